"""What the ascend platform needs of a machine's software, and what it finds there. Neither torch nor triton is imported
before their versions are known to fit.

Which versions go together, by their makers' documents (2026):

    triton-ascend 3.2.0    CANN 8.5.0, torch_npu 2.7.1, Python 3.9 to 3.11 (its installation guide)
    cann-shmem, API 1.1    CANN 8.3.RC1 or newer, Python 3.10 to 3.12 (SHMEM's quick start)
    torch_npu x.y          torch x.y (its compatibility table)
"""

import importlib
import importlib.machinery
import os
import re
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..errors import BackendError

TRITON_ASCEND, TORCH_NPU, CANN, WHEEL_API = "3.2.0", "2.7.1", "8.5.0", (1, 1)

GET = {
    "triton-ascend": f"pip uninstall -y triton triton-ascend; pip install triton-ascend=={TRITON_ASCEND} pybind11 "
    "(wheels for Python up to 3.11)",
    "torch_npu": f"pip install torch=={TORCH_NPU} torch_npu=={TORCH_NPU} (on x86-64 torch=={TORCH_NPU}+cpu from torch's own "
    "index of CPU wheels)",
    "CANN": f"install the CANN toolkit {CANN} of hiascend.com, then `source /usr/local/Ascend/ascend-toolkit/set_env.sh` in "
    "the shell that starts the ranks",
    "shmem": "pip install cann-shmem, with the --index-url of the package index that CANN's documentation names",
}

# The wheel's functions that this platform calls.
CALLS = (
    "set_conf_store_tls", "aclshmemx_init_status", "aclshmem_get_unique_id", "aclshmem_init_using_unique_id",
    "aclshmem_init", "InitAttr", "OpEngineType", "aclshmem_align", "aclshmem_ptr", "aclshmem_free", "aclshmem_finalize",
    "aclshmem_putmem", "aclshmem_putmem_nbi", "aclshmem_getmem", "aclshmem_getmem_nbi", "aclshmemx_putmem_signal",
    "aclshmemx_putmem_signal_nbi", "aclshmem_info_get_version",
)  # fmt: skip


@dataclass
class Found:
    """Versions as texts, None for what is missing."""

    triton_ascend: str | None
    triton_files: str | None  # the version of the files in site-packages/triton, where stock triton can overwrite them
    torch: str | None
    torch_npu: str | None
    cann_home: str | None  # ASCEND_HOME_PATH, which set_env.sh sets
    cann: str | None  # "" when its folder has no version file
    wheel: str | None
    compiler: bool = True  # bishengir-compile is where triton-ascend looks for it


def look():
    """What this Python and this shell have; imports nothing."""
    home = os.environ.get("ASCEND_HOME_PATH") or None
    return Found(
        triton_ascend=_installed("triton-ascend"),
        triton_files=_triton_files(),
        torch=_installed("torch"),
        torch_npu=_installed("torch-npu"),
        cann_home=home,
        cann=_cann_version(Path(home)) if home and Path(home).is_dir() else None,
        wheel=_installed("cann-shmem") or _installed("shmem"),  # older wheels are called shmem
        compiler=_has_compiler(),
    )


def _installed(distribution):
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _triton_files():
    """triton's version by its source text; None unless triton-ascend's backend lies in the same folder."""
    spec = importlib.machinery.PathFinder.find_spec("triton")
    if spec is None or not spec.origin:
        return None
    source = Path(spec.origin)
    version = re.search(r"""^__version__ = ['"]([^'"]+)""", source.read_text(), re.MULTILINE)
    return version[1] if version and (source.parent / "backends" / "ascend").is_dir() else None


def _cann_version(home):
    """The version in CANN's ascend_*_install.info, "" when there is none."""
    for pattern in ("ascend_*_install.info", "*-linux/ascend_*_install.info"):
        for path in sorted(home.glob(pattern)):
            found = re.search(r"^\s*version\s*=\s*(\S+)", path.read_text(errors="replace"), re.MULTILINE)
            if found:
                return found[1]
    return ""


def _has_compiler():
    places = os.environ.get("PATH", "").split(os.pathsep) + [os.environ.get("TRITON_NPU_COMPILER_PATH", "")]
    return any(os.access(os.path.join(place, "bishengir-compile"), os.X_OK) for place in places if place)


def key(version):
    """A version's order: "8.5.0" is above "8.5.0.alpha001", "3.2.0" above "3.2.0rc4", "8.5.0.1" above "8.5.0"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    parts = [int(part) for part in numbers[0].split(".")] if numbers else []
    rest = version[numbers.end() :] if numbers else version
    before = bool(re.match(r"[.\-_]?(a|b|rc|alpha|beta|dev)", rest, re.IGNORECASE))
    return (parts + [0] * 3)[: max(3, len(parts))], not before


def check(found):
    """Raises BackendError that names everything that is missing, too old or mismatched; returns warnings (texts)."""
    wrong, doubts = [], []

    def need(name, what, has):
        wrong.append(f"{name}: found {has}, needed {what}; get it: {GET[name]}")

    if found.cann_home is None:
        need("CANN", f"{CANN} or newer", "no ASCEND_HOME_PATH, so its set_env.sh was not sourced")
    elif found.cann is None:
        need("CANN", f"{CANN} or newer", f"no folder at ASCEND_HOME_PATH={found.cann_home}")
    elif found.cann == "":
        doubts.append(f"CANN at {found.cann_home} does not tell its version: {CANN} or newer is needed")
    elif key(found.cann) < key(CANN):
        need("CANN", f"{CANN} or newer", f"{found.cann} at {found.cann_home}")
    elif key(found.cann)[0][:2] != key(CANN)[0][:2]:
        doubts.append(f"CANN {found.cann} was not paired with triton-ascend {TRITON_ASCEND} by its makers: {CANN} was")
    _check_torch(found, need)
    _check_triton(found, need, doubts)
    if found.wheel is None:
        need("shmem", "the cann-shmem wheel", "neither a cann-shmem nor a shmem distribution")
    if wrong:
        here = f"Python {sys.version_info.major}.{sys.version_info.minor} in {sys.prefix}"
        raise BackendError(
            f"the ascend platform cannot start with {here}:\n  " + "\n  ".join(wrong) + "\n  or set TRITON_DIST_BACKEND=cpu"
        )
    return doubts


def _check_torch(found, need):
    if found.torch_npu is None:
        need("torch_npu", f"{TORCH_NPU}, matching torch", f"none (torch {found.torch or 'is missing, too'})")
    elif found.torch is None:
        need("torch_npu", "a torch of the same version", f"torch_npu {found.torch_npu} without torch")
    elif key(found.torch_npu)[0][:2] != key(found.torch)[0][:2]:
        need("torch_npu", f"the same version as torch {found.torch}", found.torch_npu)
    elif key(found.torch_npu)[0][:2] < key(TORCH_NPU)[0][:2]:
        need("torch_npu", f"{TORCH_NPU} or newer", found.torch_npu)


def _check_triton(found, need, doubts):
    if found.triton_ascend is None:
        need("triton-ascend", TRITON_ASCEND, "none")
        return
    if not (key(TRITON_ASCEND) <= key(found.triton_ascend) and key(found.triton_ascend)[0][:2] == [3, 2]):
        need("triton-ascend", f"{TRITON_ASCEND} (a later 3.2 at your own risk)", found.triton_ascend)
    elif found.triton_files is None or key(found.triton_files)[0][:2] != [3, 2]:
        has = f"{found.triton_ascend}, but another triton ({found.triton_files or 'of another version'}) lies over its files"
        need("triton-ascend", "its own files: both install into the folder triton", has)
    elif found.triton_ascend != TRITON_ASCEND:
        doubts.append(f"triton-ascend {found.triton_ascend}: the kernels were lowered and checked with {TRITON_ASCEND} only")
    if not found.compiler:
        doubts.append(
            "bishengir-compile is on neither PATH nor TRITON_NPU_COMPILER_PATH: kernels will fail to compile. CANN "
            f"{CANN} has it in its bin folder (source set_env.sh), else build AscendNPU-IR and put its bin on PATH"
        )


_checked = None


def require():
    """torch, with torch_npu loaded, after the checks; BackendError says what is wrong. Warnings are given once."""
    global _checked
    found = look()
    if _checked != found:
        for doubt in check(found):
            warnings.warn(f"triton_dist, ascend: {doubt}", RuntimeWarning, stacklevel=3)
        _checked = found
    torch = _import("torch", "torch_npu")
    _import("torch_npu", "torch_npu")
    return torch


def wheel():
    """The `shmem` module of CANN with its native part loaded, after the checks."""
    require()
    module = _import("shmem", "shmem")
    package = Path(__file__).parents[1]
    if package in Path(getattr(module, "__file__", None) or "/").parents:
        raise BackendError(
            f"`import shmem` found {module.__file__}, which is triton_dist's own: take {package} off sys.path (a script in "
            "that folder puts it there) so that CANN's shmem wheel is found"
        )
    try:
        missing = [name for name in CALLS if not hasattr(module, name)]
        version = None if missing else tuple(module.aclshmem_info_get_version())
    except Exception as error:  # it loads its native part at the first use of a name
        raise BackendError(
            f"the shmem wheel {look().wheel} cannot load its native part: {type(error).__name__}: {error}. It must be built "
            f"for the CANN that is sourced ({look().cann or 'unknown'}); get it: {GET['shmem']}"
        ) from error
    if missing or not (version[0] == WHEEL_API[0] and version >= WHEEL_API):
        has = f"lacks {', '.join(missing)}" if missing else f"has API {'.'.join(map(str, version))}"
        raise BackendError(
            f"the shmem module at {getattr(module, '__file__', '?')} (distribution version {look().wheel}) {has}; needed: "
            f"API {WHEEL_API[0]}.{WHEEL_API[1]}; get it: {GET['shmem']}"
        )
    return module


def _import(name, part):
    try:
        return importlib.import_module(name)
    except Exception as error:  # a CANN that was not sourced shows as an ImportError about a library of its own
        raise BackendError(
            f"the ascend platform: `import {name}` failed: {type(error).__name__}: {error}. If a library is missing, "
            f"{GET['CANN']}; else reinstall: {GET[part]}"
        ) from error

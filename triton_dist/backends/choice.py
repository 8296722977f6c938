"""Which platform this process uses. Imports neither torch nor triton nor numpy.

The first that holds:

    TRITON_DIST_BACKEND=cpu|nvidia|ascend
    TRITON_INTERPRET=1                                                -> cpu
    an NPU's device node (/dev/davinci0 ...), or triton-ascend installed without torch (a lowering toolchain) -> ascend
    the NVIDIA driver counts a GPU that CUDA_VISIBLE_DEVICES does not hide -> nvidia
    nothing of these                                                  -> cpu
"""

import ctypes
import glob
import importlib.util
import os
import sys
from importlib import metadata

from ..errors import BackendError

NAMES = ("cpu", "nvidia", "ascend")


def choose():
    """The platform's name; BackendError when the environment contradicts itself or triton is missing."""
    asked = os.environ.get("TRITON_DIST_BACKEND", "").strip().lower()
    if asked and asked not in NAMES:
        raise BackendError(f"TRITON_DIST_BACKEND={asked!r} is no platform: choose one of {', '.join(NAMES)}")
    if asked in ("nvidia", "ascend") and interpret_asked():
        raise BackendError(
            f"TRITON_DIST_BACKEND={asked} compiles kernels, but TRITON_INTERPRET={os.environ['TRITON_INTERPRET']} asks "
            "for the interpreter: unset TRITON_INTERPRET, or set TRITON_DIST_BACKEND=cpu"
        )
    name = asked or ("cpu" if interpret_asked() else _found_here())
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        extra = "" if name == "ascend" else f" (`pip install .[{name}]` in a checkout of triton_dist brings it)"
        package = "triton-ascend" if name == "ascend" else "triton"
        raise BackendError(f"triton is not installed in {sys.prefix}: `pip install {package}`{extra}")
    return name


def interpret_asked():
    """Whether TRITON_INTERPRET is on, read as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "0").strip().lower() in ("1", "true", "yes", "on", "y")


def _found_here():
    if glob.glob("/dev/davinci[0-9]*"):
        return "ascend"
    if importlib.util.find_spec("torch") is None and _installed("triton-ascend"):
        return "ascend"
    return "nvidia" if count_gpus() else "cpu"


def _installed(distribution):
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def count_gpus():
    """GPUs that the NVIDIA driver lists, 0 when CUDA_VISIBLE_DEVICES hides them all or there is no driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return 0
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    count = ctypes.c_uint(0)
    status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return count.value if status == 0 else 0


def turn_interpreter_on():
    """On cpu: sets TRITON_INTERPRET=1 before triton is imported. False without numpy, where only compiling is
    possible."""
    if "numpy" not in sys.modules and importlib.util.find_spec("numpy") is None:
        return False
    language = getattr(sys.modules.get("triton"), "language", None)
    zeros = getattr(language, "zeros", None)
    if zeros is not None and type(zeros).__name__ == "JITFunction":
        raise BackendError(
            "triton was imported with its interpreter off, which the cpu platform needs on: put `import triton_dist` "
            "before `import triton` (and before whatever imports triton), or export TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    return True


def install_interpreter():
    """Makes Triton's interpreter cooperative (see `triton_dist.interpreter`)."""
    try:
        from .. import interpreter
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("triton_dist"):
            raise
        raise BackendError(
            f"the cpu platform needs {error.name}, which is not installed in {sys.prefix}: `pip install {error.name}`, "
            "or `pip install .[cpu]` in a checkout of triton_dist"
        ) from error
    interpreter.install()

"""One kernel for an Ascend NPU, as far as the public compiler goes. Runs where triton-ascend is (see toolchain.py).

    Triton  --triton-ascend-->  TTIR  --triton-adapter-opt-->  ttadapter  --bishengir-compile-->  HIVM

`ttadapter` is MLIR in linalg, memref and hivm. The HIVM module at the end has its memory planned and its
synchronisation in place, and is the exact input of `hivmc`, which makes the device object. hivmc comes with CANN and is
not run here: that the HIVM was written and that the log says that hivmc is missing is the furthest one can get.
"""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import ascendnpuir
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend

from .aclshmem import custom_call
from .chips import CHIPS, SIMT_CHIP
from .hints import hint, kernel_line

STAGES = ("none", "ttir", "ttadapter", "hivm")

_BIN = Path(ascendnpuir.__file__).parent / "bin"
_NO_HIVMC = re.compile(r"Cannot find hivmc(-a5)? under \$PATH")
_TIMEOUT = 120  # seconds, of each compiler run
# triton-adapter-opt 3.2.0 crashes on some kernels (moe_combine) in a few of a hundred runs on the same input, and is right in
# the others: what ends by a signal is tried again. A kernel that always crashes it fails all the same.
TRIES = 4


@dataclass
class Lowered:
    """What became of a kernel.

    stage: the last one reached, of STAGES. Texts of later stages are None.
    log: of the stage that failed: the compiler's words; else the log of the last stage.
    """

    name: str
    chip: str
    ttir: str | None = None
    ttadapter: str | None = None
    hivm: str | None = None
    stage: str = "none"
    log: str = ""


def lower(fn, signature, constants=None, chip="Ascend910B2", options=None):
    """Lowers a kernel as far as it goes; never raises for what the compiler says about it.

    Args:
        fn: a `triton.jit` function.
        signature: {parameter: type} of those that are no constants, in order: "*fp16", "i32", ...
        constants: {parameter: value} of constexprs and of arguments that are to be compiled in.
        chip: one of chips.CHIPS, or SIMT_CHIP.
        options: compiler options of triton-ascend's backend by name, such as {"multibuffer": False}.
    """
    out = to_ttadapter(fn, signature, constants, chip, options)
    return to_hivm(out, options) if out.stage == ("ttir" if chip == SIMT_CHIP else "ttadapter") else out


def _backend(chip, options):
    target = GPUTarget("npu", chip, 0)
    backend = make_backend(target)
    extra = dict(compile_mode="simt_only", compile_on_910_95=True) if chip == SIMT_CHIP else {}
    return target, backend, backend.parse_options({**extra, **(options or {})})


def known_options():
    """Names of the compiler options that `lower` takes."""
    _, _, options = _backend(CHIPS[0], None)
    return sorted(vars(options))


def to_ttadapter(fn, signature, constants=None, chip="Ascend910B2", options=None):
    """The first steps of `lower`, all that the host needs to execute a kernel."""
    out = Lowered(fn.__name__, chip)
    target, backend, options = _backend(chip, options)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages = {}
    backend.add_stages(stages, options)
    metadata = {"target": target, "hash": "0", **vars(options)}
    try:
        source = ASTSource(fn=fn, signature=signature, constants=constants or {})
        module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
        module = stages["ttir"](module, metadata)
    except Exception as error:
        out.log = "\n".join([*causes(error), kernel_line(fn, error)]).rstrip()
        return out
    out.ttir, out.stage = str(module), "ttir"
    if chip == SIMT_CHIP:
        return out
    for tries_left in reversed(range(TRIES)):
        try:
            out.ttadapter, out.stage = stages["ttadapter"](module, metadata), "ttadapter"
            break
        except subprocess.CalledProcessError as error:
            if error.returncode < 0 and tries_left:
                continue
            log = f"triton-adapter-opt ended with {error.returncode}\n{error.stderr.decode(errors='replace')}"
            out.log = f"{log}\n{hint(log)}".rstrip()
            break
    return out


def to_hivm(out, options=None):
    """The last step: fills `hivm`, `stage` and `log` of a Lowered that has its ttadapter text; returns it."""
    _, _, options = _backend(out.chip, options)
    if out.chip == SIMT_CHIP:
        tool, text = "bishengir-compile-a5", out.ttir
        flags = {"enable-triton-ir-compile": "true", "pure-simt": "true", "num-warps": options.num_warps,
                 "threads-per-warp": options.warp_size}  # fmt: skip
    else:
        try:
            text = custom_call.rewrite(out.ttadapter)  # calls of aclshmem's device functions; others' text stays as it is
        except custom_call.RewriteError as error:
            out.log = str(error)
            return out
        # triton-ascend's own backend takes mix_mode away, too, before it calls the compiler.
        tool, text = "bishengir-compile", re.sub(r', mix_mode\s*=\s*"[^"]*"', "", text)
        flags = {
            "enable-hfusion-compile": "true",
            "enable-hivm-compile": "true",
            "enable-triton-kernel-compile": "true",
            "enable-auto-multi-buffer": str(options.multibuffer).lower(),
            "enable-auto-bind-sub-block": str(options.enable_auto_bind_sub_block).lower(),
        }
    flags.update({"target": out.chip, "save-temps": "."})
    with tempfile.TemporaryDirectory(prefix="triton_dist_hivm_") as folder:
        Path(folder, "kernel.mlir").write_text(text)
        command = [_BIN / tool, "kernel.mlir", *(f"--{k}={v}" for k, v in flags.items()), "-o", "kernel"]
        # An hivmc on the path would go on to CANN's linker: what is asked for ends before it.
        environment = {**os.environ, "PATH": "/usr/bin:/bin"}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT
            )
        except subprocess.TimeoutExpired:
            out.log = f"{tool} had not ended after {_TIMEOUT} s"
            return out
        out.log = done.stderr + done.stdout
        final = Path(folder, "module.hivm.opt.mlir")
        # The exit status is no guide: it is not 0 without hivmc, and 0 from some versions that wrote nothing.
        if done.returncode >= 0 and _NO_HIVMC.search(out.log) and final.is_file() and final.stat().st_size:
            out.hivm, out.stage = final.read_text(), "hivm"
        else:
            out.log = f"{tool} ended with {done.returncode}\n{out.log}"
    return out


def causes(error):
    """The texts of an exception and of what it was raised from."""
    while error is not None:
        yield f"{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__

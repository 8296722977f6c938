"""Which platform `import triton_dist` picks, each in a fresh process."""

import importlib.util
import os
import subprocess
import sys

import pytest

from triton_dist.backends import choice
from triton_dist.errors import BackendError

SHOW = "import triton_dist as t; print(t.backend, t.interpreted)"
interprets = pytest.mark.skipif(
    importlib.util.find_spec("greenlet") is None, reason="the cpu platform needs greenlet, which is not installed"
)


def python(code, **environ):
    """(exit status, stdout, stderr) of a Python that sees none of the variables that choose."""
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TRITON_DIST_BACKEND")}
    env.update(environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout.strip(), done.stderr


@interprets
def test_cpu_turns_the_interpreter_on_before_triton_is_imported():
    code = SHOW + "; import os, triton.language as tl; print(os.environ['TRITON_INTERPRET'], type(tl.zeros).__name__)"
    status, out, err = python(code, TRITON_DIST_BACKEND="cpu")
    assert status == 0, err
    assert out == "cpu True\n1 InterpretedFunction"


def test_importing_picks_a_platform_without_importing_torch():
    code = "import sys; from triton_dist.backends import choice; print('torch' in sys.modules, 'triton' in sys.modules)"
    status, out, err = python(code, TRITON_DIST_BACKEND="nvidia")
    assert (status, out) == (0, "False False"), err


@pytest.mark.parametrize("name", ["nvidia", "ascend", " NVIDIA "])
def test_a_platform_that_is_asked_for_is_taken(name):
    status, out, err = python(SHOW, TRITON_DIST_BACKEND=name)
    assert (status, out) == (0, f"{name.strip().lower()} False"), err


@interprets
def test_interpret_alone_means_cpu():
    assert python(SHOW, TRITON_INTERPRET="1")[:2] == (0, "cpu True")


@pytest.mark.parametrize("name", ["nvidia", "ascend"])
def test_a_device_and_the_interpreter_contradict(name):
    status, _, err = python(SHOW, TRITON_DIST_BACKEND=name, TRITON_INTERPRET="1")
    assert status and "BackendError" in err and "unset TRITON_INTERPRET" in err


def test_an_unknown_name_lists_the_three():
    status, _, err = python(SHOW, TRITON_DIST_BACKEND="cuda")
    assert status and "choose one of cpu, nvidia, ascend" in err


@interprets
def test_triton_imported_first_says_what_to_move():
    status, _, err = python("import triton; import triton_dist", TRITON_DIST_BACKEND="cpu")
    assert status and "BackendError" in err and "put `import triton_dist` before `import triton`" in err
    status, out, err = python("import triton; " + SHOW, TRITON_INTERPRET="1")
    assert (status, out) == (0, "cpu True"), err


def without(*names):
    """Code that hides modules."""
    return (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        f"hidden = {names!r}\n"
        "importlib.util.find_spec = lambda n, *a: None if n in hidden else real(n, *a)\n"
        "for n in hidden: sys.modules.pop(n, None)\n"
        "class Hide:\n"
        "    def find_spec(self, n, p=None, t=None):\n"
        "        if n.split('.')[0] in hidden: raise ModuleNotFoundError(f'No module named {n!r}', name=n)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )


def test_without_numpy_only_compiling_is_possible():
    assert python(without("numpy") + SHOW, TRITON_DIST_BACKEND="cpu")[:2] == (0, "cpu False")


def test_without_triton_the_package_to_install_is_named():
    status, _, err = python(without("triton") + SHOW, TRITON_DIST_BACKEND="cpu")
    assert status and "BackendError" in err and "pip install .[cpu]" in err
    status, _, err = python(without("triton") + SHOW, TRITON_DIST_BACKEND="ascend")
    assert status and "pip install triton-ascend" in err


def test_without_greenlet_the_package_to_install_is_named():
    status, _, err = python(without("greenlet") + SHOW, TRITON_DIST_BACKEND="cpu")
    assert status and "the cpu platform needs greenlet" in err


@pytest.fixture
def nothing(monkeypatch):
    """A machine with no device and a full Python."""
    for name in ("TRITON_DIST_BACKEND", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(choice.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(choice, "count_gpus", lambda: 0)
    return monkeypatch


def test_the_order_of_what_is_found(nothing):
    assert choice.choose() == "cpu"
    nothing.setattr(choice, "count_gpus", lambda: 2)
    assert choice.choose() == "nvidia"
    nothing.setattr(choice.glob, "glob", lambda pattern: ["/dev/davinci0"])
    assert choice.choose() == "ascend"
    nothing.setenv("TRITON_INTERPRET", "1")
    assert choice.choose() == "cpu"
    nothing.setenv("TRITON_INTERPRET", "0")
    nothing.setenv("TRITON_DIST_BACKEND", "nvidia")
    assert choice.choose() == "nvidia"


def test_a_lowering_toolchain_is_triton_ascend_without_torch(nothing):
    nothing.setattr(choice, "_installed", lambda name: name == "triton-ascend")
    assert choice.choose() == "cpu"  # torch is here
    real = choice.importlib.util.find_spec
    nothing.setattr(choice.importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    assert choice.choose() == "ascend"
    nothing.setattr(choice, "_installed", lambda name: False)
    assert choice.choose() == "cpu"


@pytest.mark.parametrize("hidden", ["", " ", "-1"])
def test_hidden_gpus_do_not_count(monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(choice.ctypes, "CDLL", lambda name: pytest.fail("asked the driver"))
    assert choice.count_gpus() == 0


class Nvml:
    """A driver with `count` GPUs."""

    def __init__(self, count, status=0):
        self.nvmlInit_v2 = lambda: status
        self.nvmlShutdown = lambda: 0

        def fill(pointer):
            pointer._obj.value = count
            return 0

        self.nvmlDeviceGetCount_v2 = fill


def test_the_driver_is_asked_for_its_count(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(choice.ctypes, "CDLL", lambda name: Nvml(3))
    assert choice.count_gpus() == 3
    monkeypatch.setattr(choice.ctypes, "CDLL", lambda name: Nvml(3, status=9))
    assert choice.count_gpus() == 0


def test_errors_are_runtime_errors():
    assert issubclass(BackendError, RuntimeError)

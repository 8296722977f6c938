"""The device language imports where there is Triton alone; its interpreted bodies take what the compiled ones take."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

BLOCK = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "numpy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""

LANGUAGE = """
import triton_dist, triton_dist.language as dl
assert not {"torch", "numpy"} & set(sys.modules), "imported all the same"
assert all(hasattr(dl, word) for word in dl.__all__)
print(triton_dist.backend, triton_dist.interpreted, type(dl.wait).__name__, dl.target.NAME.value)
"""


def run(code, backend):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_DIST_BACKEND": backend}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("backend", ["nvidia", "ascend"])
def test_the_language_imports_with_neither_torch_nor_numpy(backend):
    done = run(BLOCK + LANGUAGE, backend)
    assert done.stdout.split() == [backend, "False", "JITFunction", backend], done.stderr[-3000:]


SIGNATURES = """
import inspect, triton_dist, triton_dist.language as dl
from triton_dist.language.target import interpreter
assert triton_dist.interpreted
for word in dl.__all__:
    body = getattr(interpreter, word, None)
    if inspect.isfunction(body):
        declared, taken = inspect.signature(getattr(dl, word)), inspect.signature(body)
        assert list(declared.parameters) == list(taken.parameters), (word, declared, taken)
        for ours, theirs in zip(declared.parameters.values(), taken.parameters.values()):
            default = getattr(ours.default, "value", ours.default)
            assert default == theirs.default, (word, ours, theirs)
        assert getattr(dl, word).__doc__, word
print("agree")
"""


def test_interpreted_words_take_the_parameters_of_the_compiled_ones():
    pytest.importorskip("numpy")
    pytest.importorskip("greenlet")
    done = run(SIGNATURES, "cpu")
    assert done.stdout.strip() == "agree", done.stderr[-3000:]

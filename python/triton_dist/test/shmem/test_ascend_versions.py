"""The software that the ascend platform needs: each missing, old or mismatched part is named, with what was found, what is
needed and how to get it."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from triton_dist.backends import ascend_versions
from triton_dist.backends.ascend_versions import Found, check, key
from triton_dist.errors import BackendError

FITS = Found("3.2.0", "3.2.0", "2.7.1+cpu", "2.7.1", "/cann", "8.5.0", "1.2.0")
ROOT = Path(__file__).parents[4]


def test_what_fits_passes_without_a_warning():
    assert check(FITS) == []
    assert check(replace(FITS, torch_npu="2.7.1.post1", cann="8.5.0.1", torch="2.7.1")) == []


WRONG = {
    "CANN not sourced": ({"cann_home": None, "cann": None}, "CANN: found no ASCEND_HOME_PATH", "set_env.sh"),
    "CANN gone": ({"cann": None}, "CANN: found no folder at ASCEND_HOME_PATH=/cann", "hiascend.com"),
    "CANN old": ({"cann": "8.3.RC1"}, "CANN: found 8.3.RC1 at /cann, needed 8.5.0 or newer", "set_env.sh"),
    "CANN alpha": ({"cann": "8.5.0.alpha001"}, "CANN: found 8.5.0.alpha001", "8.5.0 or newer"),
    "torch_npu missing": ({"torch_npu": None}, "torch_npu: found none (torch 2.7.1+cpu)", "pip install torch==2.7.1"),
    "torch missing": ({"torch": None}, "torch_npu: found torch_npu 2.7.1 without torch", "pip install torch==2.7.1"),
    "both missing": ({"torch_npu": None, "torch": None}, "torch is missing, too", "torch_npu==2.7.1"),
    "torch differs": ({"torch": "2.8.0"}, "found 2.7.1, needed the same version as torch 2.8.0", "torch_npu==2.7.1"),
    "torch_npu old": ({"torch": "2.6.0", "torch_npu": "2.6.0"}, "found 2.6.0, needed 2.7.1 or newer", "torch_npu==2.7.1"),
    "triton-ascend missing": ({"triton_ascend": None}, "triton-ascend: found none, needed 3.2.0", "triton-ascend==3.2.0"),
    "triton-ascend candidate": ({"triton_ascend": "3.2.0rc4"}, "triton-ascend: found 3.2.0rc4", "triton-ascend==3.2.0"),
    "triton-ascend new": ({"triton_ascend": "3.4.0"}, "triton-ascend: found 3.4.0", "pip uninstall -y triton"),
    "stock triton over it": ({"triton_files": "3.9.0"}, "another triton (3.9.0) lies over", "pip uninstall -y triton"),
    "its files gone": ({"triton_files": None}, "another triton (of another version) lies over", "pip uninstall -y triton"),
    "wheel missing": ({"wheel": None}, "shmem: found neither a cann-shmem nor a shmem", "pip install cann-shmem, with"),
}


@pytest.mark.parametrize("change, found, get", WRONG.values(), ids=WRONG)
def test_each_wrong_part_is_named_with_what_is_needed_and_how_to_get_it(change, found, get):
    with pytest.raises(BackendError) as info:
        check(replace(FITS, **change))
    text = str(info.value)
    assert found in text and get in text and "get it: " in text and text.endswith("or set TRITON_DIST_BACKEND=cpu")
    assert text.count("get it: ") == 1, "what fits is not named"


def test_all_wrong_parts_are_named_at_once():
    with pytest.raises(BackendError) as info:
        check(Found(None, None, None, None, None, None, None))
    assert [str(info.value).count(f"\n  {part}: found") for part in ("CANN", "torch_npu", "triton-ascend", "shmem")] == [1] * 4


@pytest.mark.parametrize("change, warning", [
    ({"cann": ""}, "does not tell its version"),
    ({"cann": "9.0.0"}, "CANN 9.0.0 was not paired with triton-ascend 3.2.0"),
    ({"triton_ascend": "3.2.1", "triton_files": "3.2.0"}, "checked with 3.2.0 only"),
    ({"compiler": False}, "bishengir-compile is on neither PATH"),
])  # fmt: skip
def test_what_may_work_is_a_warning(change, warning):
    (text,) = check(replace(FITS, **change))
    assert warning in text


def test_versions_are_ordered_as_their_makers_mean_them():
    order = ["8.1.RC1", "8.3.RC1", "8.3.RC2", "8.5.0.alpha001", "8.5.0", "8.5.0.1", "8.5.1", "9.0.0", "10.0"]
    assert all(key(a) <= key(b) for a, b in zip(order, order[1:]))
    assert key("8.5.0.alpha001") < key("8.5.0") < key("8.5.0.1") and key("3.2.0rc4") < key("3.2.0")
    assert key("2.7.1+cpu") == key("2.7.1") == key("2.7.1.post1") and key("8.5") == key("8.5.0")


LOOK = """
import json, os, sys
sys.path[:0] = os.environ["STAND_IN_PATH"].split(os.pathsep)
from triton_dist.backends import ascend_versions
print(json.dumps(vars(ascend_versions.look())))
assert not {"torch", "torch_npu", "triton", "shmem"} & set(sys.modules), "something was imported"
"""


def run(code, environment, *args):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run([sys.executable, "-c", code, *args], env=environment, capture_output=True, text=True, timeout=120)


def test_versions_are_found_without_importing_anything(ascend_machine):
    minor = random.randrange(6, 90)
    done = run(LOOK, ascend_machine(cann=f"8.{minor}.1", cann_shmem=f"1.{minor}.0", triton_ascend="3.2.0"))
    found = Found(**json.loads(done.stdout or "{}")) if done.stdout else pytest.fail(done.stderr)
    assert (found.cann, found.wheel, found.triton_ascend, found.triton_files) == (
        f"8.{minor}.1", f"1.{minor}.0", "3.2.0", "3.2.0"
    )  # fmt: skip
    assert found.torch == found.torch_npu and found.compiler
    bare = ascend_machine(cann=None, compiler=False, cann_shmem=None, torch_npu=None, triton_ascend=None)
    bare["STAND_IN_PATH"] = bare["STAND_IN_PATH"].split(os.pathsep)[1]  # without the stand-in's triton
    done = run(LOOK, {**bare, "PATH": ""})
    found = Found(**json.loads(done.stdout)) if done.stdout else pytest.fail(done.stderr)
    assert (found.cann_home, found.cann, found.compiler) == (None, None, False)
    assert (found.wheel, found.torch_npu, found.triton_ascend, found.triton_files) == (None,) * 4
    done = run(LOOK, {**ascend_machine(cann=""), "PATH": ""})
    assert json.loads(done.stdout)["cann"] == "" and json.loads(done.stdout)["compiler"]


# Each case is a change to a fitting machine, and init; all fork from one process that has imported torch.
CASES = {
    "fits": ({}, ""),
    "two things wrong": ({"cann": "8.1.RC1", "cann_shmem": None}, ""),
    "a doubt": ({"cann": "9.0.0"}, "shmem.aclshmem_init(shmem.InitAttr(0, 1, '', 1 << 20)), shmem.aclshmem_finalize()"),
    "a call is missing": ({}, "import shmem as wheel; del wheel.aclshmem_align"),
    "another API": ({}, "import shmem as wheel; wheel.aclshmem_info_get_version = lambda: (1, 0)"),
    "native part": (
        {},
        "import shmem as wheel\n"
        "def broken(name): raise RuntimeError('Symbol aclrtGetFuncBySymbol is not available')\n"
        "del wheel.aclshmem_init; wheel.__getattr__ = broken",
    ),
    "torch_npu does not load": ({}, "sys.modules['torch_npu'] = None"),
    "our own shmem": ({}, "sys.modules['shmem'] = shmem"),  # a script in triton_dist/ has that folder on sys.path
}

INIT = """
import json, os, sys, traceback
from triton_dist import shmem
for name, (environment, change) in json.loads(sys.argv[1]).items():
    if os.fork():
        assert os.wait()[1] == 0, name
        continue
    os.environ.update(environment)
    sys.path[:0] = os.environ["STAND_IN_PATH"].split(os.pathsep)
    os.dup2(1, 2)
    try:
        exec(change, {"shmem": shmem, "sys": sys})
        code = shmem.aclshmem_init(shmem.InitAttr(0, 1, "", 1 << 20))
        print("\\n" + json.dumps([name, code, shmem.last_error()]), flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def inits(ascend_machine):
    """{case: (code, last_error, what was shown)}"""
    cases = json.dumps({name: (ascend_machine(**change), code) for name, (change, code) in CASES.items()})
    done = run(INIT, {"TRITON_DIST_BACKEND": "ascend"}, cases)
    assert done.returncode == 0, done.stdout + done.stderr
    told, shown = {}, []
    for line in done.stdout.splitlines():
        if line.startswith("["):
            if not line.startswith("[ERROR]"):
                name, code, said = json.loads(line)
                told[name], shown = (code, said, "\n".join(shown)), []
                continue
        shown.append(line)
    return told


def test_init_says_everything_that_is_wrong(inits):
    assert inits["fits"] == (0, "", "")
    code, said, _ = inits["two things wrong"]
    assert code == -100 and "CANN: found 8.1.RC1" in said and "shmem: found neither" in said


def test_init_warns_once_and_works_with_software_that_may_do(inits):
    code, said, shown = inits["a doubt"]
    assert code == 0, said
    assert shown.count("RuntimeWarning: triton_dist, ascend: CANN 9.0.0 was not paired") == 1


@pytest.mark.parametrize("case, words", [
    ("a call is missing", "(distribution version 1.2.0) lacks aclshmem_align; needed: API 1.1; get it: pip install"),
    ("another API", "has API 1.0; needed: API 1.1; get it: pip install cann-shmem"),
    ("native part", "the shmem wheel 1.2.0 cannot load its native part: RuntimeError: Symbol aclrtGetFuncBySymbol"),
    ("torch_npu does not load", "`import torch_npu` failed: ModuleNotFoundError: import of torch_npu halted"),
    ("our own shmem", "which is triton_dist's own: take"),
])  # fmt: skip
def test_a_wheel_that_does_not_fit_is_named(case, words, inits):
    code, said, _ = inits[case]
    assert code == -100 and words in said, said


def test_every_call_of_the_wheel_is_one_that_is_asked_for():
    source = (Path(ascend_versions.__file__).parent / "ascend.py").read_text()
    called = {name for name in ascend_versions.CALLS if f'"{name}"' in source or f"wheel.{name}" in source}
    assert called == set(ascend_versions.CALLS) - {"aclshmem_info_get_version"}

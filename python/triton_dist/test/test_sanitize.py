"""benchmarks/sanitize.py against stand-ins for NVIDIA's compute-sanitizer: what it says of errors, of a tool that hangs, that
watches nothing, that is missing; and that nothing is left running."""

import importlib.util
import os
import stat
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "sanitize.py"

# As the tool does: drops empty variables, then runs the program behind its own options.
HEAD = """#!{python}
import os, subprocess, sys
program = sys.argv[sys.argv.index({python!r}):]
env = {{name: value for name, value in os.environ.items() if value}}
print("========= COMPUTE-SANITIZER", flush=True)
"""
RUN = "code = subprocess.run(program, env=env).returncode\n"
COUNT = "print('========= ERROR SUMMARY: {} errors')\nsys.exit(code)\n"
REPORT = """print('''========= Invalid __global__ write of size 4 bytes
=========     at put_kernel+0x50
=========     by thread (0,0,0) in block (1,0,0)
========= Internal Sanitizer Error: Errors might go undetected
========= Error: process didn't terminate successfully''')
"""
WORKER = """
import os
assert os.environ.get("TRITON_DIST_SANITIZE_WORDS", "none") == "{words}"
with open(os.environ["TRITON_DIST_SANITIZE_PROGRESS"], "a") as file:
    file.write("put 0\\nget 3\\n")
"""


@pytest.fixture
def sanitize():
    spec = importlib.util.spec_from_file_location("sanitize", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Makes `compute-sanitizer` of the lines of a script, and the worker of others."""

    def make(lines):
        path = tmp_path / "bin" / "compute-sanitizer"
        path.parent.mkdir()
        path.write_text(HEAD.format(python=sys.executable) + lines)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)

    return make


@pytest.fixture
def worker(tmp_path, sanitize, monkeypatch):
    def make(text):
        path = tmp_path / "worker.py"
        path.write_text(text)
        monkeypatch.setattr(sanitize, "__file__", str(path))

    return make


def test_words_run_under_a_tool_that_drops_empty_variables(sanitize, tool, worker, tmp_path):
    tool(RUN + COUNT.format(0))
    worker(WORKER.format(words="none"))
    assert sanitize.run("memcheck", "", tmp_path, 30) == ({"put": 0, "get": 3}, {}, [], 0, "status 0")


def test_errors_are_counted_by_kernel_and_by_the_tool(sanitize, tool, worker, tmp_path):
    tool(RUN + REPORT + COUNT.format(2))
    worker(WORKER.format(words="put,get"))
    wrong, errors, unnamed, told, ended = sanitize.run("racecheck", "put,get", tmp_path, 30)
    assert errors == {"put_kernel": 1} and told == 2 and ended == "status 0"
    assert len(unnamed) == 1 and unnamed[0].startswith("Internal Sanitizer Error")


def test_a_tool_that_watched_nothing_gives_no_clean_result(sanitize, tool, worker, tmp_path):
    tool("print('========= Error: No attachable process found. compute-sanitizer timed-out.')\n" + RUN + "sys.exit(code)\n")
    worker(WORKER.format(words="none"))
    *_, unnamed, told, ended = sanitize.run("memcheck", "", tmp_path, 30)
    assert told == 0 and "watched nothing" in ended and "No attachable process" in unnamed[0]


def test_racecheck_counts_hazards(sanitize):
    text = """
========= Error: Race reported between Write access at wait_kernel+0x30
=========     and Read access at wait_kernel+0x50 [4 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
    assert sanitize.reports(text) == ({"wait_kernel": 1}, [], 1)
    assert sanitize.reports("") == ({}, [], None)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("hangs", ["tool", "worker"])
def test_what_hangs_is_ended_and_nothing_is_left(sanitize, tool, worker, tmp_path, monkeypatch, hangs):
    monkeypatch.setattr(sanitize, "GRACE_S", 0.5)
    pids = tmp_path / "pids"
    note = f"import os, time\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
    tool(note + RUN + ("time.sleep(600)\n" if hangs == "tool" else COUNT.format(0)))
    worker(note + ("time.sleep(600)\n" if hangs == "worker" else ""))
    start = time.monotonic()
    *_, ended = sanitize.run("memcheck", "", tmp_path, 1)
    assert ended == "not within 1 s" and time.monotonic() - start < 30
    started = pids.read_text().split()
    assert len(started) == 2
    end = time.monotonic() + 10
    while any(map(alive, started)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, started))


def test_a_missing_tool_is_said_before_anything_runs(sanitize, monkeypatch):
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    monkeypatch.setattr(sanitize.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(sanitize, "run", lambda *arguments: pytest.fail("ran"))
    monkeypatch.setattr(sys, "argv", ["sanitize.py"])
    with pytest.raises(SystemExit, match="CUDA toolkit"):
        sanitize.main()


@pytest.mark.dist
def test_ranks_run_a_word_under_the_tool(sanitize, tool, tmp_path, ranks, monkeypatch):
    ranks(2)
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[1]), prepend=os.pathsep)
    tool(RUN + COUNT.format(0))
    assert sanitize.run("memcheck", "notify", tmp_path, 120) == ({"notify": 0}, {}, [], 0, "status 0")

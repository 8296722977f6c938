"""Waits that end by a limit of time, in PTX for sm_90: nothing of it where it was not asked for, little where it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
sys.path.insert(0, str(HERE))

from ptx import Instruction, in_loop, loops, parse, where  # noqa: E402

sys.path.remove(str(HERE))

CASES = ["wait ge", "wait written out", "wait i64", "wait n", "barrier_grid i32"]


def compile_words(out, **more):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("TRITON_INTERPRET", "TRITON_DEBUG", "TRITON_DIST_WAIT_TIMEOUT"):
        environment.pop(name, None)
    command = [sys.executable, HERE / "words.py", "nvidia", out, *CASES]
    done = subprocess.run(command, env={**environment, **more}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: parse(result["ptx"]) for name, result in json.loads(out.read_text()).items()}


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    return compile_words(tmp_path_factory.mktemp("limits") / "without.json")


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    return compile_words(tmp_path_factory.mktemp("limits") / "with.json", TRITON_DIST_WAIT_TIMEOUT="5")


def opcodes(items):
    return [item.opcode for item in items if isinstance(item, Instruction)]


def timers(items):
    return [i for i, item in enumerate(items) if isinstance(item, Instruction) and "%globaltimer" in item.operands]


def test_without_a_limit_a_wait_is_instruction_for_instruction_the_loop_written_out(without):
    assert opcodes(without["wait ge"]) == opcodes(without["wait written out"])


@pytest.mark.parametrize("name", CASES)
def test_without_a_limit_nothing_looks_at_a_clock(without, name):
    assert not timers(without[name])


@pytest.mark.parametrize("name", ["wait ge", "wait i64"])
def test_without_a_limit_a_turn_is_one_access_to_memory(without, name):
    items = without[name]
    (loop,) = loops(items)
    touched = [i for i in range(*loop) if isinstance(items[i], Instruction) and "global" in items[i].parts]
    assert touched == [i for i in where(items, "ld", "sys", "acquire") if loop[0] < i < loop[1]] and len(touched) == 1


@pytest.mark.parametrize("name", ["wait ge", "wait i64", "wait n", "barrier_grid i32"])
def test_with_a_limit_waits_look_at_the_clock_in_their_loops(limited, name):
    items = limited[name]
    assert any(in_loop(items, i) for i in timers(items))


@pytest.mark.parametrize("name", ["wait ge", "wait i64"])
def test_with_a_limit_a_turn_is_still_one_access_unless_it_looks_at_the_clock(limited, name):
    """Every poll stands in a loop of its own, which touches nothing else and looks at no clock."""
    items = limited[name]
    polls = where(items, "ld", "sys", "acquire")
    assert len(polls) == 2, "the first turns, and those after each look at the clock"
    for poll in polls:
        first, last = min((span for span in loops(items) if span[0] < poll < span[1]), key=lambda span: span[1] - span[0])
        touched = [i for i in range(first, last) if isinstance(items[i], Instruction) and "global" in items[i].parts]
        assert touched == [poll] and not any(first < i < last for i in timers(items))


def test_a_wait_that_comes_true_at_once_does_nothing_more_than_without_a_limit(limited, without):
    """Up to the branch past the loop."""
    one, other = opcodes(limited["wait ge"]), opcodes(without["wait ge"])
    past = one.index("bra")
    memory = ("ld.global", "st.global", "atom", "bar", "fence")
    assert [o for o in one[:past] if o.startswith(memory)] == [o for o in other[: other.index("bra")] if o.startswith(memory)]


def test_what_a_wait_that_gives_up_writes_is_ordered_before_its_mark(limited):
    items = limited["wait ge"]
    first = where(items, "atom", "add")[0]
    stores = [i for i in where(items, "st", "global") if i > first and items[i].guard]
    fence = [i for i in where(items, "fence", "acq_rel", "sys") if i > first]
    assert len(stores) == 12 and stores[-2] < fence[0] < stores[-1]

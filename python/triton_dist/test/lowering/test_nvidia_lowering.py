"""What the words of the device language become in PTX for sm_90, compiled on a machine that needs no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
sys.path.insert(0, str(HERE))

from ptx import Instruction, continues_while, in_loop, loops, parse, where, width  # noqa: E402

sys.path.remove(str(HERE))

COPY_DTYPES = ("fp32", "fp16", "bf16", "fp8e5", "fp8e4nv", "i8", "i16", "i32", "i64")


def compile_words(target, tmp_path):
    """{case: {"ptx" or "error": text}} of words.py, from one process."""
    out = tmp_path / "words.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("TRITON_INTERPRET", "TRITON_DEBUG"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, HERE / "words.py", target, out], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compile_words("nvidia", tmp_path_factory.mktemp("nvidia"))


@pytest.fixture(scope="module")
def compiled_for_ascend(tmp_path_factory):
    return compile_words("ascend", tmp_path_factory.mktemp("ascend"))


@pytest.fixture(scope="module")
def code(compiled):
    return lambda name: parse(compiled[name]["ptx"])


def releases(items):
    """`red` where the old value is not used (Triton 3.9)."""
    return sorted(where(items, "atom", "global", "sys", "release") + where(items, "red", "global", "sys", "release"))


def acquires(items):
    return sorted(where(items, "ld", "global", "sys", "acquire") + where(items, "atom", "global", "sys", "acquire"))


def test_every_word_compiles_or_is_refused_as_its_case_says(compiled, compiled_for_ascend):
    for results in (compiled, compiled_for_ascend):
        wrong = {
            name: r.get("error", "compiled") for name, r in results.items() if ("error" in r) != ("refused" in name)
        }
        assert not wrong


# -- notify


@pytest.mark.parametrize("dtype", ["i32", "i64"])
@pytest.mark.parametrize("op", ["set", "add"])
def test_notify_is_one_release_at_system_scope_after_a_barrier_after_every_store(code, op, dtype):
    items = code(f"notify {op} {dtype}")
    (signal,) = releases(items)
    assert {"set": "exch", "add": "add"}[op] in items[signal].parts
    assert items[signal].parts[-1][1:] == dtype[1:]
    assert items[signal].guard, "one thread alone must signal"
    last_store = where(items, "st", "global")[-1]
    assert any(last_store < barrier < signal for barrier in where(items, "bar", "sync"))


def test_notify_sets_one_by_default(code):
    items = code("notify default")
    assert [i for i in releases(items) if "exch" in items[i].parts]


def test_notify_waits_for_tma_stores_to_reach_memory_before_the_barrier(code):
    items = code("symm_at descriptor")
    (signal,) = releases(items)
    store = [i for i in where(items, "cp", "async", "bulk", "tensor") if "bulk_group" in items[i].opcode][-1]
    complete = [i for i in where(items, "cp", "async", "bulk", "wait_group") if "read" not in items[i].parts]
    assert any(store < done < barrier < signal for done in complete for barrier in where(items, "bar", "sync")), (
        "without wait_group 0 the signal overtakes the TMA store"
    )


def test_put_signal_releases_after_the_put(code):
    items = code("put_signal")
    (signal,) = releases(items)
    assert "add" in items[signal].parts
    assert any(where(items, "st", "global")[-1] < barrier < signal for barrier in where(items, "bar", "sync"))


def test_notify_all_signals_the_ranks_side_by_side(code):
    items = code("notify_all")
    (signal,) = releases(items)
    assert "tid" in "".join(i.operands for i in items[:signal] if isinstance(i, Instruction))


# -- wait


@pytest.mark.parametrize(
    "cmp, again", [("ge", "lt"), ("gt", "le"), ("eq", "ne"), ("ne", "eq"), ("le", "gt"), ("lt", "ge")]
)
def test_wait_polls_in_a_loop_while_its_comparison_is_false(code, cmp, again):
    items = code(f"wait {cmp}")
    (loop,) = [span for span in loops(items) if any(span[0] < i < span[1] for i in acquires(items))]
    assert continues_while(items, loop) == again


@pytest.mark.parametrize("name", ["wait default", "wait i64", "wait n"])
def test_wait_acquires_at_system_scope_then_meets_a_barrier_before_any_data_is_read(code, name):
    items = code(name)
    polls = acquires(items)
    assert any(in_loop(items, i) for i in polls)
    data = [i for i in where(items, "ld", "global") if "acquire" not in items[i].parts]
    assert data and data[0] > polls[-1]
    assert any(polls[-1] < barrier < data[0] for barrier in where(items, "bar", "sync"))


@pytest.mark.parametrize("name", ["wait default", "wait n", "test", "atomic scalar", "quiet"])
def test_after_an_acquire_the_async_proxy_is_fenced(code, name):
    items = code(name)
    fences = where(items, "fence", "proxy", "async", "global")
    assert fences and fences[-1] > max(acquires(items), default=0)


def test_a_tma_load_comes_after_the_proxy_fence_of_its_wait(code):
    items = code("symm_at descriptor")
    load = [i for i in where(items, "cp", "async", "bulk", "tensor") if "mbarrier" in items[i].opcode][0]
    assert any(acquires(items)[-1] < fence < load for fence in where(items, "fence", "proxy", "async", "global"))


def test_wait_n_polls_many_signals_at_once(code):
    items = code("wait n")
    polls = [i for i in acquires(items) if in_loop(items, i)]
    assert 1 <= len(polls) <= 2  # one block of lanes for each of the two waits


def test_test_does_not_loop(code):
    items = code("test")
    assert len(acquires(items)) == 1 and not in_loop(items, acquires(items)[0])


@pytest.mark.parametrize("name", ["notify before sm_90", "wait before sm_90"])
def test_before_sm_90_there_is_no_tma_to_order(code, name):
    items = code(name)
    assert not where(items, "cp", "async", "bulk") and not where(items, "fence", "proxy", "async")


# -- fences


def test_fence_orders_the_stores_of_all_threads(code):
    items = code("fence")
    stores = where(items, "st", "global")
    (fence,) = where(items, "fence", "acq_rel", "sys")
    assert stores[0] < fence < stores[-1]
    assert any(stores[0] < barrier < fence for barrier in where(items, "bar", "sync"))


def test_quiet_is_sequentially_consistent_and_ends_in_a_barrier(code):
    items = code("quiet")
    (fence,) = where(items, "fence", "sc", "sys")
    assert any(fence < barrier < where(items, "st", "global")[-1] for barrier in where(items, "bar", "sync"))


# -- copies


def assert_wide(items, in_a_loop=True):
    for kind in ("ld", "st"):
        wide = [i for i in where(items, kind, "global") if width(items[i]) == 16]
        assert wide, f"no 16-byte {kind}.global"
        if in_a_loop:
            assert any(in_loop(items, i) and not items[i].guard for i in wide)


@pytest.mark.parametrize("dtype", COPY_DTYPES)
@pytest.mark.parametrize("word", ["put", "get"])
def test_copies_stay_16_bytes_wide_across_the_translation(code, word, dtype):
    assert_wide(code(f"{word} {dtype}"))


def test_a_put_with_its_signal_is_as_wide_as_a_put(code):
    assert_wide(code("put_signal"))


def test_put_is_wide_whatever_the_kind_of_n(code):
    assert_wide(code("put n of int64"))
    assert_wide(code("put defaults"), in_a_loop=False)  # 4 blocks, unrolled


def test_put_counts_in_64_bits_when_n_has_64(code):
    items = code("put n of int64")
    assert any("s64" in items[i].parts for i in where(items, "setp"))


def test_a_peer_outside_the_team_is_an_assertion_in_debug_mode_and_costs_nothing_otherwise(compiled, code):
    assert "__assertfail" in compiled["put in debug mode"]["ptx"]
    assert "__assertfail" not in compiled["put fp16"]["ptx"]
    narrow = [i for i in where(code("put fp16"), "ld", "global") if width(code("put fp16")[i]) == 8]
    assert len(narrow) == 1, "only the peer's delta is read from the context table"


@pytest.mark.parametrize("word", ["put_2d", "get_2d"])
def test_2d_copies_are_wide_when_the_strides_are_aligned(code, word):
    assert_wide(code(word), in_a_loop=False)


@pytest.mark.parametrize("word", ["remote_load", "remote_store"])
def test_tiles_to_and_from_a_peer_are_wide(code, word):
    assert_wide(code(word), in_a_loop=False)


RELAXED = "relaxed", "sys", "global"


@pytest.mark.parametrize("dtype", ["i32", "fp32", "i64", "fp64"])
@pytest.mark.parametrize("kind", ["loaded", "computed", "summed", "of a product"])
def test_relaxed_stores_are_16_bytes_wide_and_each_element_is_one_threads(code, kind, dtype):
    items = code(f"store_relaxed {kind} {dtype}")
    wide = [i for i in where(items, "st", *RELAXED) if width(items[i]) == 16]
    assert len(wide) == 1, "16 bytes a thread are the whole block: more would be second stores of the same elements"
    assert items[wide[0]].guard, "where the elements are neighbours, aligned and not masked off"
    single = [i for i in where(items, "st", *RELAXED) if i not in wide]
    assert len(single) == 16 * 8 // int(dtype[-2:]) and all(items[i].guard for i in single)
    assert not [i for i in where(items, "st", "global") if i not in wide + single], "no plain store"
    exchanges = where(items, "atom", "sys", "relaxed", "exch")
    assert len(exchanges) == (kind == "of a product"), "of 64 lanes, fewer than threads"


@pytest.mark.parametrize("dtype", ["i32", "fp32", "i64", "fp64"])
@pytest.mark.parametrize("kind", ["few", "scalar", "rows"])
def test_other_relaxed_stores_are_exchanges_by_one_thread_each(code, kind, dtype):
    items = code(f"store_relaxed {kind} {dtype}")
    exchanges = where(items, "atom")
    assert exchanges and exchanges == where(items, "atom", "exch", *RELAXED)
    assert all(items[i].guard for i in exchanges)
    assert not where(items, "st", "global")


# -- atomics


@pytest.mark.parametrize("dtype", ["i32", "i64", "u32", "u64", "fp32", "fp64"])
@pytest.mark.parametrize("op", ["add", "max", "min", "xchg"])
def test_atomics_are_acq_rel_at_system_scope_between_barriers(code, op, dtype):
    items = code(f"atomic {op} {dtype}")
    atoms = where(items, "atom")
    assert atoms and atoms == where(items, "atom", "global", "sys", "acq_rel")
    if op in ("add", "xchg") or dtype.startswith(("i", "u")):  # a maximum of floats is one of integers by sign
        assert {"xchg": "exch"}.get(op, op) in items[atoms[0]].parts
    barriers = where(items, "bar", "sync")
    assert barriers[0] < atoms[0] and atoms[-1] < barriers[-1]


@pytest.mark.parametrize("name", ["cas i32", "cas i64", "cas u32", "cas u64", "cas block"])
def test_cas_is_acq_rel_at_system_scope(code, name):
    items = code(f"atomic {name}")
    assert where(items, "atom") == where(items, "atom", "global", "sys", "acq_rel", "cas") != []


# -- barriers


@pytest.mark.parametrize("dtype", ["i32", "i64"])
@pytest.mark.parametrize("name", ["barrier_all", "barrier_clear", "barrier_grid"])
def test_barriers_release_before_they_acquire(code, name, dtype):
    items = code(f"{name} {dtype}")
    assert releases(items) and acquires(items)
    assert any(in_loop(items, i) for i in acquires(items))
    assert len(where(items, "bar", "sync")) >= 2


# -- refusals


def expected_word(case):
    words = case.split()
    if words[1] == "atomic":
        return f"dl.atomic_{words[2]}"
    named = {"cmp": "dl.wait", "op": "dl.notify", "ctx": "shmem.context()", "cas": "dl.atomic_cas", "add": "dl.notify"}
    return named.get(words[1], f"dl.{words[1]}")


def test_what_a_target_cannot_do_is_refused_with_the_name_of_the_word(compiled, compiled_for_ascend):
    for target, results in (("nvidia", compiled), ("ascend", compiled_for_ascend)):
        for case, result in results.items():
            if not case.startswith("refused"):
                continue
            if case == "refused atomic add i32 on ascend":  # its old value is used
                assert "None" in result["error"]
                continue
            assert expected_word(case) in result["error"], case
            dtype = next((word for word in case.split() if word in ("fp16", "bf16")), "")
            assert dtype in result["error"], case
            if target == "ascend":
                assert "ascend" in result["error"], case

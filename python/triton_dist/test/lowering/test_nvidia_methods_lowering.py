"""What the methods for NVIDIA GPUs become on sm_90, compiled without a GPU: widths, polls, and that they fit as often as they
must, since their programs wait for one another."""

import pytest

from .compiled_apart import compiled_by
from .ptx import in_loop, parse, where, width

SHARED_OF_A_MULTIPROCESSOR, RESERVED_A_PROGRAM, REGISTERS = 228 << 10, 1 << 10, 65536  # compute capability 9.0
PROGRAMS = {  # a multiprocessor, at the same time
    "tma scatter": 2, "tma all": 2, "added": 1, "put last": 4, "gather": 4, "pipelined": 2, "sentinel": 24, "combine": 2,
    "dispatch pipelined": 2, "dispatch pipelined few": 1, "combine pipelined": 1, "combine pipelined few": 2,
    "dispatch tokens": 2, "dispatch tokens few": 1,
}  # fmt: skip

RAGGED = {"put last ragged": 4, "gather ragged": 4}  # sizes that are no multiples of anything
SMALL = {"sentinel": 1, "dispatch tokens few": 1, "put last": 2, "gather": 2}  # words of 16 bytes of a tile in a thread


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compiled_by("nvidia_methods.py", tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("name", [*PROGRAMS, "flagged", "await"])
def test_nothing_spills(compiled, name):
    assert compiled[name]["spills"] == 0


@pytest.mark.parametrize("name", [*PROGRAMS, *RAGGED])
def test_as_many_programs_fit_as_wait_for_one_another(compiled, name):
    one, programs = compiled[name], (PROGRAMS | RAGGED)[name]
    assert programs * (one["shared"] + RESERVED_A_PROGRAM) <= SHARED_OF_A_MULTIPROCESSOR
    granule = 8 * 32  # registers are dealt out to warps in steps of 8 a thread
    warps = one["threads"] // 32
    assert programs * warps * (-(-one["registers"] * 32 // granule) * granule) <= REGISTERS


@pytest.mark.parametrize("name", PROGRAMS)
def test_tiles_are_stored_and_read_16_bytes_at_a_time(compiled, name):
    code = parse(compiled[name]["ptx"])
    stores = [width(code[i]) for i in where(code, "st", "global") if not code[i].is_("st", "sys")]
    assert stores.count(16) >= SMALL.get(name, 4)
    assert max(stores) == 16
    assert where(code, "ld", "global", "v4")


@pytest.mark.parametrize("name", ["tma scatter", "tma all", "pipelined"])
def test_a_turn_of_a_poll_loop_is_one_acquiring_load(compiled, name):
    code = parse(compiled[name]["ptx"])
    polls = [i for i in where(code, "ld", "sys", "acquire") if in_loop(code, i)]
    assert polls
    assert not where(code, "atom", "sys", "acquire")


def test_words_travel_with_their_flags_in_single_64_bit_elements(compiled):
    code = parse(compiled["flagged"]["ptx"])
    puts = where(code, "st", "global", "relaxed", "sys", "b64")
    assert [i for i in puts if width(code[i]) == 16], "the put"
    assert where(code, "ld", "volatile", "global", "b64"), "the poll"
    assert not where(code, "atom") and not where(code, "red"), "no signal"


def test_words_that_show_themselves_are_put_and_polled_16_bytes_at_a_time(compiled):
    code = parse(compiled["sentinel"]["ptx"])
    stores = [i for i in where(code, "st", "global", "relaxed", "sys") if width(code[i]) == 16]
    assert len(stores) == 3, "the put to the peer, and the clearing after either rank's words"
    polls = where(code, "ld", "volatile")
    assert polls and all(width(code[i]) == 16 for i in polls)
    assert any(in_loop(code, i) for i in polls)
    assert not where(code, "bar") and not where(code, "atom") and not where(code, "red"), "no signal, no barrier"


@pytest.mark.parametrize("name", ["tma scatter", "tma all"])
def test_operands_come_by_descriptor_to_the_matrix_units(compiled, name):
    assert "wgmma.mma_async" in compiled[name]["ptx"]
    assert "cp.async.bulk.tensor.2d.shared" in compiled[name]["ptx"]

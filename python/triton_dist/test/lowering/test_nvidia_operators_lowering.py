"""What all operators launch by default on NVIDIA GPUs, compiled for sm_90 without one: nothing spills, memory is moved 16 bytes
at a time, a turn of a poll loop is one access."""

import pytest

from .compiled_apart import compiled_by
from .ptx import Instruction, in_loop, loops, parse, where, width

# Bytes a thread that ptxas puts on the stack though registers are left: words of the context table, read ahead of their use.
KEPT = {"mesh_kernel": 16, "all_gather_kernel": 16}
RAGGED_SPILLS = 1024  # bytes: edges that are not multiples of 16 bytes are moved element by element, with a pointer each


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """{(operator, kernel): facts}"""
    made = compiled_by("nvidia_operators.py", tmp_path_factory.mktemp("nvidia"), timeout=600)
    assert len(made) >= 25 and all(made.values())
    return {(operator, name): facts for operator, kernels in made.items() for name, facts in kernels.items()}


def failing(compiled, wrong):
    """{operator and kernel: what is wrong with it}"""
    return {name: said for name, facts in compiled.items() if (said := wrong(name, facts, parse(facts["ptx"])))}


def test_nothing_spills(compiled):
    def wrong(name, facts, code):
        allowed = RAGGED_SPILLS if "ragged" in name[0] else KEPT.get(name[1], 0)
        return facts["spills"] > allowed and facts["spills"]

    assert not failing(compiled, wrong)


def polls(code):
    return [i for i in where(code, "ld", "acquire") + where(code, "atom", "acquire") + where(code, "ld", "volatile")]


def spins(code):
    """The polls that are the only access of a loop: every turn of it is a poll."""
    alone = []
    for first, last in loops(code):
        touched = [i for i in range(first, last) if isinstance(code[i], Instruction) and "global" in code[i].parts]
        alone += touched if len(touched) == 1 and touched[0] in polls(code) else []
    return alone


def test_every_wait_polls_at_system_scope_and_a_turn_is_one_access(compiled):
    def wrong(name, facts, code):
        turning = spins(code)
        relaxed = [i for i in polls(code) if not code[i].is_("ld", "volatile", "b64") and "sys" not in code[i].parts]
        # the first look of a wait may stand before its loop; the second reading of words with flags stands behind it
        if relaxed or not turning or len(polls(code)) > 2 * len(turning):
            return [str(code[i]) for i in polls(code)]

    assert not failing(compiled, wrong)


def moves(code, kind):
    """{bytes: number} of the loads or stores of memory, without polls and signals."""
    widths = {}
    for i in where(code, kind, "global"):
        if i not in polls(code) and "release" not in code[i].parts:
            widths[width(code[i])] = widths.get(width(code[i]), 0) + 1
    return widths


def moving(name):
    return name[0] != "barrier" and "ragged" not in name[0]


def test_every_kernel_moves_data_16_bytes_at_a_time(compiled):
    def wrong(name, facts, code):
        flagged = name[1] == "flagged_kernel"  # 32 bits and their flag in one element of 64
        if moving(name) and not (moves(code, "ld").get(8 if flagged else 16) and moves(code, "st").get(16)):
            return moves(code, "ld"), moves(code, "st")

    assert not failing(compiled, wrong)


def test_what_is_stored_in_loops_is_16_bytes_wide_but_for_tables_of_words(compiled):
    """Tables: of counts and places, in all-to-all-v and in mixtures of experts."""

    def wrong(name, facts, code):
        allowed = {16} | ({4} if name[0].startswith(("moe", "all_to_all")) else set())
        narrow = [code[i].opcode for i in where(code, "st", "global") if in_loop(code, i) and width(code[i]) not in allowed]
        return moving(name) and narrow

    assert not failing(compiled, wrong)


def test_products_run_on_the_matrix_units(compiled):
    products = [name for name in compiled if "gemm" in name[0] and "float32" not in name[0] and "fp32" not in name[0]]
    assert len(products) >= 9
    assert not [name for name in products if "wgmma.mma_async" not in compiled[name]["ptx"]]

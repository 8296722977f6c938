"""What contexts with method=None choose from measured times, alike on all ranks; the command that measures them."""

import contextlib
import json
import os
import subprocess
import sys
from unittest import mock

import pytest

import triton_dist  # noqa: F401  before triton
from triton_dist import shmem
from triton_dist.kernels import create_gemm_reduce_scatter_context, gemm_reduce_scatter
from triton_dist.kernels.all_reduce import SENTINEL_BYTES, short_bytes
from triton_dist.kernels import moe_dispatch_gather, moe_dispatch_pipelined, moe_dispatch_pipelined_tokens
from triton_dist.kernels.arguments import chosen_candidate, chosen_method, tuned_arguments
from triton_dist.kernels.gemm_reduce_scatter import METHODS as GEMM_REDUCE_SCATTER_METHODS
from triton_dist.kernels.moe_dispatch import _configured, default_config
from triton_dist.tune import OPERATORS, tune
from triton_dist.tune.__main__ import main
from triton_dist.tune.shapes import defaults
from triton_dist.tuning import cache, crossover, entries, identity, lookup

import torch

kernels_moe_dispatch = sys.modules["triton_dist.kernels.moe_dispatch"]  # the name is the function's, too
pytestmark = pytest.mark.dist

METHODS = ("kernel", "tma", "streams", "sequence")
KEY = dict(dtype="bfloat16", M=64, N=64)


def best_is(method, world=2, **key):
    times = {**dict(kernel=4.0, tma=3.0, streams=3.0, sequence=2.0), method: 1.0}
    rows = [dict(candidate=dict(method=one), microseconds=dict(queued=us)) for one, us in times.items()]
    where = "NVIDIA H200", world, {**KEY, "K": 64, **key}, identity.operators_digest()
    return entries.make("gemm_reduce_scatter", *where, rows)


def chosen(suited="sequence", team=0, methods=METHODS, config=None, **key):
    """As an nvidia platform with an H200 would choose."""
    with h200():
        return chosen_method("create_x_context", methods, suited, config, None, team, "gemm_reduce_scatter", {**KEY, **key})


def own_caches(folder):
    me = shmem.my_pe()
    os.environ["TRITON_DIST_CACHE_DIR"] = str(folder / str(me))
    found = [chosen()]  # nobody has measured: the estimate
    if me == 1:
        cache.write(best_is("tma"))
    found.append(chosen())  # the first rank alone counts
    if me == 0:
        cache.write(best_is("streams"))
    found.append(chosen())
    found.append(chosen(config=dict(BLOCK_M=64)))  # the user's config is the portable kernel's
    found.append(chosen(methods=("kernel", "sequence")))  # what is not possible is not chosen
    found.append(chosen(suited="sequence" if me else "tma", M=9999))  # even an estimate is the first rank's
    return found


def test_the_first_ranks_cache_chooses_for_all(ranks, tmp_path):
    found = ranks(2).run(own_caches, tmp_path)
    assert found[0] == found[1] == ["sequence", "sequence", "streams", "kernel", "sequence", "tma"]


def teams(folder):
    me = shmem.my_pe()
    os.environ["TRITON_DIST_CACHE_DIR"] = str(folder / str(me))
    pair, alone = shmem.team_split_strided(0, 0, 1, 2), shmem.team_split_strided(0, 2, 1, 1)
    team = pair if me < 2 else alone
    if me == 0:
        cache.write(best_is("streams"))
    found = [chosen(team=team)]
    if me == 2:
        cache.write(best_is("streams", world=1))
    return [*found, chosen(team=team)]


def test_teams_that_would_choose_differently_take_the_portable_kernel(ranks, tmp_path):
    assert ranks(3).run(teams, tmp_path) == [["kernel", "streams"]] * 3


def h200():
    """As if the platform were nvidia with an H200."""
    both = contextlib.ExitStack()
    both.enter_context(mock.patch.object(triton_dist, "backend", "nvidia"))
    both.enter_context(mock.patch.object(identity, "device_name", lambda: "NVIDIA H200"))
    return both


def made_of(operator, times, **key):
    """An entry; times: [(candidate, microseconds)]."""
    rows = [dict(candidate=candidate, microseconds=dict(queued=us)) for candidate, us in times]
    return entries.make(operator, "NVIDIA H200", 2, dict(dtype="bfloat16", **key), identity.operators_digest(), rows)


def whole_candidates(folder):
    os.environ["TRITON_DIST_CACHE_DIR"] = str(folder)
    candidate = dict(method="pipelined", config=dict(BLOCK_T=1, num_warps=4), programs=528)
    if shmem.my_pe() == 0:
        sizes = dict(tokens=4096, hidden=4096, topk=8, experts=64, fp8=False)
        cache.write(made_of("moe_dispatch", [(dict(method="gather"), 2.0), (candidate, 1.0)], **sizes))
    shmem.barrier_all()
    found = []
    for experts in (64, 1024):
        key = dict(tokens=4096, hidden=4096, topk=8, experts=experts, fp8=False, dtype="bfloat16")
        with h200():
            found.append(chosen_candidate("create_x", ["gather", "pipelined"], "gather", None, None, 0, "moe_dispatch", key))
    assert found == [candidate, dict(method="gather")], found


def test_a_measured_configuration_comes_with_its_method(ranks, tmp_path):
    ranks(2).run(whole_candidates, tmp_path)


def names_of_layouts():
    asked = []

    def choose(*given):
        asked.append(given[-2:])
        return dict(method="gather")

    with mock.patch.object(kernels_moe_dispatch, "chosen_candidate", choose):
        for layout in kernels_moe_dispatch.LAYOUTS:
            kernels_moe_dispatch.create_moe_dispatch_context(4, 8, 2, 3, torch.float32, layout=layout).free()
    key = dict(tokens=4, hidden=8, topk=2, experts=3, fp8=False, dtype="float32")
    assert asked == [("moe_dispatch", key), ("moe_dispatch_tokens", key)]


def test_layouts_of_a_dispatch_are_measured_under_names_of_their_own(ranks):
    ranks(1).run(names_of_layouts)


def test_a_measured_configuration_is_taken_where_it_fits():
    small, programs = dict(PUTTERS=66, BLOCK_P=2, BLOCK_T=1, num_warps=4), 528
    with h200() as platform:
        modules = moe_dispatch_gather, moe_dispatch_pipelined, moe_dispatch_pipelined_tokens, kernels_moe_dispatch
        for module in modules:
            platform.enter_context(mock.patch.object(module, "device_programs", lambda: multiprocessors))
        multiprocessors = 132
        defaults = default_config("pipelined", 4096, 4096)
        assert _configured(4096, 4096, "pipelined", small, programs) == ({**defaults[0], **small}, programs)
        assert _configured(4096, 4096, "pipelined", dict(BLOCK_T=4)) == ({**defaults[0], "BLOCK_T": 4}, defaults[1])
        assert _configured(4096, 4096, "pipelined") == defaults
        assert _configured(4096, 4096, "gather") == default_config("gather", 4096, 4096)
        few = default_config("pipelined", 128, 4096)
        assert few[0]["CHUNK"] < 4 and _configured(128, 4096, "pipelined", dict(BLOCK_T=4)) == few
        assert _configured(4096, 4096, "pipelined", dict(BLOCK_OF_ANOTHER_VERSION=4)) == defaults
        in_place = default_config("pipelined", 4096, 4096, "tokens")
        assert _configured(4096, 4096, "pipelined", small, programs, "tokens") == ({**in_place[0], **small}, programs)
        assert _configured(4096, 4096, "pipelined", dict(STREAM_ROWS=1), layout="tokens") == in_place  # of the layout rows
        assert _configured(4096, 4096, "pipelined", dict(BLOCK_P=16), layout="tokens") == in_place  # chunks of 8
        multiprocessors = 66  # half of the device, see `concurrent`
        assert _configured(4096, 4096, "pipelined", small, programs) == default_config("pipelined", 4096, 4096)


def grids(folder):
    os.environ["TRITON_DIST_CACHE_DIR"] = str(folder)
    names, key = ("programs", "block"), dict(dtype="bfloat16", bytes=4096)
    if shmem.my_pe() == 0:
        times = [({}, 2.0), (dict(programs=16, block=2048), 1.0), (dict(method="other"), 0.5)]
        cache.write(made_of("all_gather", times, bytes=4096))
        for power, best in enumerate(("sentinel", "sentinel", "mesh", "sentinel"), 10):
            other = "mesh" if best == "sentinel" else "sentinel"
            times = [(dict(method=best), 1.0), (dict(method=other), 2.0)]
            cache.write(made_of("all_reduce", times, bytes=4**power))
    shmem.barrier_all()
    with h200():
        found = [tuned_arguments("create_x", "all_gather", 0, key, names)]
        found.append(tuned_arguments("create_x", "all_gather", 0, None if shmem.my_pe() else key, names))  # as the first rank
        found.append(tuned_arguments("create_x", "all_gather", 0, None, names))
        found.append(tuned_arguments("create_x", "all_gather", 0, {**key, "bytes": 1 << 20}, names))
        found += [short_bytes(0, torch.bfloat16), short_bytes(0, torch.float32)]
    if triton_dist.backend == "cpu":
        assert tuned_arguments("create_x", "all_gather", 0, key, names) == {}  # nothing was measured there
    return found


def test_grids_and_the_size_up_to_which_short_messages_go_are_looked_up(ranks, tmp_path):
    grid = dict(programs=16, block=2048)
    found = [grid, grid, {}, {}, 2 * 4**11, SENTINEL_BYTES]  # half way between 4^11 and 4^12; none for float32
    assert ranks(2).run(grids, tmp_path) == [found] * 2


def test_a_crossover_beyond_what_was_measured_and_rivals_that_do_not_count():
    def rows(**times):
        return [(dict(method=method), us) for method, us in times.items()]

    lost_at_first = [
        made_of("all_reduce", rows(sentinel=1.1, flagged=1.0, mesh=2.0), bytes=1 << 13),
        made_of("all_reduce", rows(sentinel=1.0, flagged=1.2, mesh=2.0), bytes=1 << 15),
    ]
    sentinel, flagged = dict(method="sentinel"), dict(method="flagged")
    assert crossover(lost_at_first, "bytes", sentinel) == 0
    assert crossover(lost_at_first, "bytes", sentinel, [flagged]) == 1 << 15
    assert crossover(lost_at_first, "bytes", sentinel, [flagged], beyond=1 << 20) == 1 << 20
    assert crossover(lost_at_first, "bytes", sentinel, [flagged], beyond=1 << 10) == 1 << 15
    found_out = [*lost_at_first, made_of("all_reduce", rows(sentinel=3.0, flagged=4.0, mesh=2.0), bytes=1 << 17)]
    assert crossover(found_out, "bytes", sentinel, [flagged], beyond=1 << 20) == 1 << 16


def measured_on_cpu(folder):
    os.environ["TRITON_DIST_CACHE_DIR"] = str(folder)
    found = tune("gemm_reduce_scatter", (20, 8, 16), torch.float16, samples=1)
    assert found.baseline is None and [one.candidate["method"] for one in found.timings] == list(GEMM_REDUCE_SCATTER_METHODS)
    assert all(one.microseconds or "tma" in str(one.candidate) for one in found.timings)
    assert tune("gemm_reduce_scatter", (20, 8, 16), torch.float16, samples=1).origin == "cache"
    key = dict(dtype="float16", M=20, N=8)
    assert lookup("gemm_reduce_scatter", key, shmem.pe_count()) == found.best
    with pytest.raises(ValueError, match="the shape is .*: give M, N, K"):
        tune("gemm_reduce_scatter", (20, 8), torch.float16)
    with pytest.raises(ValueError, match="the operator is 'gemm': give one of"):
        tune("gemm", (20, 8, 4), torch.float16)
    context = create_gemm_reduce_scatter_context(20, 8, torch.float16, **found.best)
    a, b = torch.ones(20, 16).half(), torch.ones(16, 8).half()
    assert (gemm_reduce_scatter(a, b, context) == 16 * shmem.pe_count()).all()
    return found.best


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_program_tunes_and_its_contexts_find_it(world, ranks, tmp_path):
    if triton_dist.backend != "cpu":
        pytest.skip("the candidates are those of the cpu platform")
    found = ranks(world).run(measured_on_cpu, tmp_path, timeout=120)
    assert all(one == found[0] for one in found)


def command(ranks, *arguments, folder, world=2):
    ranks(world)  # skips where there are too few devices
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = {**inherited, "TRITON_DIST_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}"]
    return subprocess.run(
        [*start, "-m", "triton_dist.tune", *arguments], env=environment, capture_output=True, text=True, timeout=300
    )


def test_the_command_measures_every_operator_and_writes_a_table(ranks, tmp_path):
    file = tmp_path / "tables" / "here.json"
    ran = command(ranks, *OPERATORS, "--samples", "1", "--output", str(file), folder=tmp_path / "cache")
    assert ran.returncode == 0, ran.stderr
    found = entries.read_file(file)
    assert {one["operator"] for one in found} == set(OPERATORS)
    for one in found:
        assert one["world"] == 2 and any("microseconds" in row for row in one["timings"])
        assert f"{one['operator']} dtype=bfloat16" in ran.stdout
    assert not (tmp_path / "cache").exists()
    assert "of torch.distributed's way" in ran.stdout


def test_the_command_keeps_shapes_in_the_cache_and_measures_them_once(ranks, tmp_path):
    arguments = ("gemm_allreduce", "--shapes", "8,8,8", "16,8,8", "--dtype", "fp16", "--samples", "1")
    first, second = (command(ranks, *arguments, folder=tmp_path) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert first.stdout.count("(measured)") == 2 and second.stdout.count("(cache)") == 2
    keys = [json.loads(path.read_text())["entries"][0]["key"] for path in tmp_path.glob("tuned/gemm_allreduce/*.json")]
    assert sorted(key["M"] for key in keys) == [8, 16]


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["gemm"], "invalid choice: 'gemm'"),
        (["gemm_allreduce", "--shapes", "8,8"], "gemm_allreduce takes M,N,K"),
        (["gemm_allreduce", "--shapes", "8,x,8"], "no list of whole numbers"),
        (["gemm_allreduce"], "torchrun --nproc-per-node=2"),
    ],
)
def test_the_command_says_what_is_wrong_with_its_arguments(arguments, text, monkeypatch, capsys):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2 and text in capsys.readouterr().err


@pytest.mark.parametrize("operator", OPERATORS)
def test_default_shapes_have_the_operators_sizes(operator):
    for on_cpu in (False, True):
        shapes = defaults(operator, on_cpu)
        assert shapes and len(set(shapes)) == len(shapes)
        assert all(len(shape) == len(OPERATORS[operator].sizes) for shape in shapes)

"""The cache of measured times and the tables: what is read, what is ignored, what several writers leave."""

import json
import os
import subprocess
import sys
import textwrap
import warnings

import pytest

import triton_dist  # noqa: F401  before triton
from triton_dist.tuning import buckets, cache, entries, identity, lookup, tables

DEVICE = "NVIDIA H200"


def entry(operator="gemm_reduce_scatter", device=DEVICE, world=2, source="s", times=None, **key):
    times = times or {"tma": 2.0, "streams": 1.0}
    rows = [
        dict(candidate=dict(method=method), **(dict(microseconds=dict(graph=us)) if us else dict(problem="rank 0: no")))
        for method, us in times.items()
    ]
    return entries.make(operator, device, world, dict(dtype="bfloat16", **key), source, rows)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tuned"


def read(**changed):
    return cache.read(**{**dict(operator="gemm_reduce_scatter", device=DEVICE, world=2, source="s"), **changed})


def test_buckets_are_two_an_octave():
    assert [buckets.bucket(n) for n in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 3072, 3073, 4096)] == [
        0, 1, 2, 3, 4, 6, 6, 8, 8, 12, 12, 16, 3072, 4096, 4096
    ]  # fmt: skip
    for n in range(1, 5000):
        assert n <= buckets.bucket(n) == buckets.bucket(buckets.bucket(n)) < max(1.5 * n, n + 1)


def test_the_default_folder_is_in_the_users_cache(monkeypatch):
    monkeypatch.delenv("TRITON_DIST_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(cache.directory()) == "/home/somebody/.cache/triton_dist/tuned"


def test_what_is_written_is_read_by_the_same_device_world_versions_and_source(folder, monkeypatch):
    one = entry(M=8192, N=4096, K=2048)
    path = cache.write(one)
    assert path.parent == folder / "gemm_reduce_scatter" and read() == [one]
    assert read(world=4) == read(device="NVIDIA H100") == read(source="t") == read(operator="all_gather") == []
    monkeypatch.setattr(identity, "versions", lambda: {"triton": "9"})
    assert read() == []


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "\x00\x01", '{"format": 1}', '{"format": 2, "entries": []}', '{"format": 1, "entries": [{}]}',
        '{"format": 1, "entries": [{"operator": "gemm_reduce_scatter", "device": "NVIDIA H200", "world": 2, "key": {}, '
        '"versions": {}, "source": "s", "timings": [{"candidate": {"method": "tma"}, "microseconds": {"graph": "soon"}}]}]}',
    ],
)  # fmt: skip
def test_a_file_that_is_none_of_ours_is_ignored_with_a_warning(folder, content):
    good = entry(M=1)
    cache.write(good)
    bad = folder / "gemm_reduce_scatter" / "bad.json"
    bad.write_text(content)
    with pytest.warns(RuntimeWarning, match=r"bad\.json is ignored"):
        assert read() == [good]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once a file
        assert read() == [good]


def test_a_file_cut_off_in_the_middle_is_ignored(folder):
    path = cache.write(entry(M=1))
    path.write_text(path.read_text()[:-20])
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert read() == []
    cache.write(entry(M=1))  # and replaced
    assert len(read()) == 1


def test_a_cache_that_is_a_file_is_empty_and_writing_warns(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_DIST_CACHE_DIR", str(tmp_path / "file"))
    assert read() == []
    with pytest.warns(RuntimeWarning, match="measured times are not kept"):
        assert cache.write(entry(M=1)) is None


def writers(code, count, *arguments):
    """`count` processes that run `code` at the same time, each with its number."""
    code = "import triton_dist, sys\nfrom triton_dist.tuning import cache, entries, tables\n" + textwrap.dedent(code)
    commands = [[sys.executable, "-c", code, str(number), *map(str, arguments)] for number in range(count)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    running = [subprocess.Popen(command, env=environment) for command in commands]
    try:
        assert [one.wait(timeout=300) for one in running] == [0] * count
    finally:
        for one in running:
            one.kill()


def test_two_writers_of_the_same_entry_leave_one_whole_file(folder):
    writers(
        """
        for i in range(200):
            rows = [dict(candidate=dict(n=n), microseconds=dict(queued=float(sys.argv[1]))) for n in range(200)]
            assert cache.write(entries.make("same", "d", 1, dict(n=1), "s", rows))
            (found,) = cache.read("same", "d", 1, "s")
            assert len({row["microseconds"]["queued"] for row in found["timings"]}) == 1
        """,
        2,
    )
    assert len(list((folder / "same").iterdir())) == 1  # no temporary file


def test_two_writers_of_one_table_lose_no_entry(tmp_path):
    writers(
        """
        for i in range(50):
            row = dict(candidate=dict(n=1), microseconds=dict(queued=1.0))
            tables.merge(sys.argv[2], [entries.make("op", "d", 1, dict(n=i, writer=sys.argv[1]), "s", [row])])
        """,
        2,
        tmp_path / "table.json",
    )
    assert len(entries.read_file(tmp_path / "table.json")) == 100
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_a_table_keeps_what_was_not_measured_again(tmp_path):
    path = tmp_path / "table.json"
    tables.merge(path, [entry(M=1), entry(M=2), entry(world=4, M=1)])
    new = entry(M=2, times={"tma": 5.0})
    tables.merge(path, [new])
    found = entries.read_file(path)
    assert len(found) == 3 and new in found
    assert path.read_text().count("\n") == 3 + 2  # an entry a line


def test_a_table_that_another_writer_replaced_unseen_loses_nothing(tmp_path, monkeypatch):
    path, stat = tmp_path / "table.json", os.stat
    tables.merge(path, [entry(M=1)])
    looks = stat(path)
    monkeypatch.setattr(os, "stat", lambda name, **more: looks if str(name) == str(path) else stat(name, **more))
    assert len(entries.read_file(path)) == 1
    entries.write_file(path, [entry(M=1), entry(M=2)])  # the other one, within a tick of the file system's clock
    tables.merge(path, [entry(M=3)])
    assert len(json.loads(path.read_text())["entries"]) == 3


@pytest.fixture
def on_h200(folder, tmp_path, monkeypatch):
    """A process whose device is an H200, without shipped tables; `ship(entries)` adds some."""
    monkeypatch.setattr(identity, "device_name", lambda: DEVICE)
    monkeypatch.setattr(identity, "operators_digest", lambda: "s")
    monkeypatch.setattr(tables, "SHIPPED", tmp_path / "tables")
    return lambda *some: tables.merge(tmp_path / "tables" / "nvidia_h200_x2.json", some)


def ask(operator="gemm_reduce_scatter", world=2, fits=lambda candidate: True, dtype="bfloat16", **sizes):
    found = lookup(operator, dict(dtype=dtype, **sizes), world, fits)
    return found and found["method"]


def test_the_users_cache_goes_before_the_shipped_table_and_the_nearer_size_before_both(on_h200):
    assert ask(M=4096, N=4096) is None
    on_h200(entry(M=4096, N=4096, K=512, times={"tma": 1.0, "streams": 2.0}))
    assert ask(M=4096, N=4096) == ask(M=4000, N=3500) == "tma"
    assert ask(M=4096, N=6000) is None and ask(M=4096, N=4096, world=4) is None and ask("gemm_allreduce", M=4096) is None
    cache.write(entry(M=4096, N=4096, K=512, times={"tma": 2.0, "streams": 1.0}))
    assert ask(M=4096, N=4096) == "streams"
    on_h200(entry(M=3500, N=3500, K=512, times={"tma": 2.0, "streams": 2.0, "sequence": 1.0}))
    assert ask(M=3500, N=3500) == "sequence" and ask(M=4096, N=4096) == "streams"


def test_a_shipped_table_holds_for_other_versions_and_the_cache_does_not(on_h200):
    old = {**entry(M=64, times={"tma": 1.0}), "versions": {"triton": "3.0.0"}, "source": "old"}
    on_h200(old)
    cache.write({**old, "timings": entry(times={"streams": 0.1})["timings"]})
    assert ask(M=64) == "tma"


def test_both_16_bit_dtypes_share_times_unless_both_were_measured(on_h200):
    on_h200(entry(M=64, times={"tma": 1.0}))
    assert ask(M=64, dtype="float16") == "tma" and ask(M=64, dtype="float32") is None
    half = entry(M=64, times={"streams": 1.0})
    half["key"]["dtype"] = "float16"
    on_h200(half)
    assert ask(M=64, dtype="float16") == "streams" and ask(M=64) == "tma"


def test_what_is_not_possible_now_is_not_chosen(on_h200):
    on_h200(entry(M=64, times={"tma": 1.0, "streams": 3.0, "sequence": 2.0, "gone": 0.5}))
    methods = ("tma", "streams", "sequence")
    assert ask(M=64, fits=lambda candidate: candidate["method"] in methods) == "tma"
    assert ask(M=64, fits=lambda candidate: candidate["method"] == "none") is None


def test_where_a_size_is_open_the_choice_is_good_for_all_that_were_measured(on_h200):
    # tma is the fastest for one K and twice as slow for the other one; streams is never more than 1.25 times slower
    on_h200(
        entry(M=64, N=64, K=1, times={"tma": 1.0, "streams": 1.25, "sequence": 3.0}),
        entry(M=64, N=64, K=9, times={"tma": 2.0, "streams": 1.0, "sequence": 1.1}),
    )
    assert ask(M=64, N=64) == "streams"
    assert ask(M=64, N=64, K=1) == "tma" and ask(M=64, N=64, K=9) == "streams"


def test_the_best_of_two_ways_is_the_one_that_is_bad_in_neither():
    table = [dict(graph=1.0, queued=3.0), dict(graph=1.2, queued=1.1), dict(graph=2.0, queued=1.0), None]
    assert buckets.best([table]) == 1
    assert buckets.best([[None, None]]) is None and buckets.best([]) is None


def test_every_shipped_table_can_be_read():
    for path in tables.SHIPPED.glob("*.json"):
        assert entries.read_file(path), path
        content = json.loads(path.read_text())["entries"]
        assert {f"{identity.slug(one['device'])}_x{one['world']}" for one in content} == {path.stem}

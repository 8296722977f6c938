"""What gemm_reduce_scatter and gemm_allreduce by copies and products give to streams, of all ranks and several calls: is all
of it in order?

The cpu platform does work when it is given, so a missing `follow` or `join` shows nowhere in results. Here streams only write
down what they are given: who reads and writes which elements, and what follows what."""

import itertools
from types import SimpleNamespace

import pytest

import triton_dist  # before triton
from triton_dist import kernels, shmem
from triton_dist.kernels import gemm_allreduce_columns, gemm_reduce_scatter_columns, stream_costs

import torch
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.skipif(triton_dist.backend != "cpu", reason="products are written down, which only torch's can be")

KINDS = {
    "scatter": gemm_reduce_scatter_columns.GemmReduceScatterColumns,
    "reduce": gemm_allreduce_columns.GemmAllReduceColumns,
    "reduce beside others": gemm_allreduce_columns.GemmAllReduceColumns,
}
CALLS = 3


def elements(tensor):
    """(memory, bits of the elements of a tensor)."""
    where = torch.full((1,), tensor.storage_offset())
    for n, step in zip(tensor.shape, tensor.stride()):
        where = (where[:, None] + torch.arange(n) * step).flatten()
    return tensor.untyped_storage().data_ptr(), sum(1 << place for place in where.tolist())


class Log(TorchFunctionMode):
    """The work given so far; `rank` is the one that gives now, `current` its stream."""

    def __init__(self, world):
        super().__init__()
        self.given, self.set, self.taken, self.seen, self.rank = [], {}, [], [], None
        self.current = [self.stream() for _ in range(world)]

    def stream(self, urgent=False):
        return Stream(self)

    def give(self, name, reads=(), writes=()):
        stream = self.current[self.rank]
        after = {one.number for one in stream.last()}
        reads, writes = (list(map(elements, tensors)) for tensors in (reads, writes))
        work = SimpleNamespace(number=len(self.given), rank=self.rank, name=name, after=after, reads=reads, writes=writes)
        self.given.append(work)
        stream.work, stream.waits = [work], []
        return work.number

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if name in ("mm", "addmm") and "out" in kwargs:
            self.give(name, args, [kwargs["out"]])
        if name == "copy_":
            self.give(name, args[1:2], args[:1])
        return function(*args, **kwargs)


class Stream:
    def __init__(self, log):
        self.log, self.work, self.waits, self.outer = log, [], [], None

    def last(self):
        return [*self.work, *self.waits]

    def mark(self):
        return self.log.current[self.log.rank].last()

    def follow(self, mark=None):
        self.waits += self.mark() if mark is None else mark

    def join(self):
        self.log.current[self.log.rank].waits += self.last()

    def __enter__(self):
        self.outer, self.log.current[self.log.rank] = self.log.current[self.log.rank], self

    def __exit__(self, *exc):
        self.log.current[self.log.rank] = self.outer


class Handoffs:
    def __init__(self, log, number, empty):
        self.log, self.me, self.number, self.signals = log, log.rank, number, None
        for writer in {*range(len(log.current))} - {self.me} if empty else ():
            log.set["free", number, writer, self.me] = [None]

    def sets(self, name, *word):
        self.log.set.setdefault(word, []).append(self.log.give(name))

    def takes(self, name, *words):
        number = self.log.give(name)
        self.log.taken += [(number, word) for word in words]

    def claim(self, reader, idle=False):
        self.takes("claim", ("free", self.number, self.me, reader))

    def publish(self, reader, part, idle=False):
        self.sets("publish", "full", self.number, reader, self.me, part)

    def receive(self, writer, *parts, idle=False):
        self.takes("receive", *(("full", self.number, self.me, writer, part) for part in parts))

    def release(self, writer):
        self.sets("release", "free", self.number, writer, self.me)


class Launched:
    """Stands for a kernel; launches are given to `give`."""

    def __init__(self, give):
        self.give = give

    def __getitem__(self, grid):
        return self.give


def before(after):
    """Of each work the bits of all that is before it; `after`: the numbers of those that it follows at once."""
    found, left = {}, set(range(len(after)))
    while left:
        ready = [number for number in left if after[number] <= found.keys()]
        assert ready, f"a circle: {sorted(left)}"
        for number in ready:
            found[number] = 0
            for one in after[number]:
                found[number] |= found[one] | 1 << one
        left -= set(ready)
    return found


def checked(kind, world, M, N, monkeypatch):
    log, K, shard = Log(world), 3, -(-M // world)
    symmetric = [[torch.zeros(world * shard * N + 1)[1:] for _ in range(2)] for _ in range(world)]
    made = [SimpleNamespace(tensors=itertools.count(), handoffs=itertools.count()) for _ in range(world)]

    def of_peer(tensor, peer, team):
        start = tensor.untyped_storage().data_ptr()
        (which,) = (i for i, one in enumerate(symmetric[log.rank]) if one.untyped_storage().data_ptr() == start)
        return symmetric[peer][which].view(tensor.shape)

    monkeypatch.setattr(shmem, "Stream", log.stream)
    monkeypatch.setattr(shmem, "peer_tensor", of_peer)
    monkeypatch.setattr(shmem, "copy", lambda to, source: to.copy_(source))
    monkeypatch.setattr(
        shmem, "Handoffs", lambda parts, team, signals, empty: Handoffs(log, next(made[log.rank].handoffs), empty)
    )

    def sum_others(parts, slot, n, ME, WORLD, BLOCK):
        log.give("sum", [parts[rank].flatten()[:n] for rank in range(WORLD) if rank != ME], [parts[ME].flatten()[:n]])

    def add_others(own, parts, slot, out, M, N, stride, ME, WORLD, **options):
        log.give("add", [own, *(parts[rank] for rank in range(WORLD) if rank != ME)], [out])

    def put_last(out, gathered, ready, calls, M, N, shard, row, first, last, *rest, **options):
        me = log.rank
        rows = slice(min(me * shard + row, M), min(me * shard + shard, M))
        there = [of_peer(gathered, peer, 0)[me, row : row + rows.stop - rows.start, first:last] for peer in others(me)]
        number = log.give("put", [out[rows, first:last], calls], [*there, calls])
        for peer in others(me):
            log.set.setdefault(("ready", peer, me), []).append(number)

    def gather(out, gathered, words, ready, calls, pieces, count, parts, M, N, shard, *rest, **options):
        me = log.rank
        theirs = [out[peer * shard : peer * shard + shard] for peer in others(me)]
        number = log.give("gather", [*(gathered[peer] for peer in others(me)), calls], [*theirs, calls])
        log.taken += [(number, ("ready", me, peer)) for peer in others(me)]
        log.seen += [(number, ("full", 1, me, peer, part)) for peer in others(me) for part in range(count - 1)]

    def awaits(words, ready, calls, count, *rest, **options):
        number, peers = log.give("await", [calls]), others(log.rank)
        log.seen += [(number, ("full", 1, log.rank, peer, part)) for peer in peers for part in range(count - 1)]
        log.seen += [(number, ("ready", log.rank, peer)) for peer in peers]

    def others(me):
        return [rank for rank in range(world) if rank != me]

    for module, name, given in (
        (gemm_reduce_scatter_columns, "sum_others_kernel", sum_others),
        (gemm_reduce_scatter_columns, "add_others_kernel", add_others),
        (gemm_allreduce_columns, "put_last_kernel", put_last),
        (gemm_allreduce_columns, "gather_kernel", gather),
        (gemm_allreduce_columns, "await_kernel", awaits),
    ):
        monkeypatch.setattr(module, name, Launched(given))
    runs = []
    for log.rank in range(world):
        owner = SimpleNamespace(num_ranks=world, rank=log.rank, team=0, device="cpu", signals=lambda n: None, table=None)
        owner.local = torch.zeros
        owner.tensor = lambda shape, dtype, rank=log.rank: symmetric[rank][next(made[rank].tensors)].view(shape)
        with kernels.concurrent(2 if "beside" in kind else 1):
            runs.append(KINDS[kind](owner, M, N, torch.float32))
    rows = [M if "reduce" in kind else len(range(M)[r * shard :][:shard]) for r in range(world)]
    operands = [[torch.zeros(M, K), torch.zeros(K, N), torch.zeros(rows[r], N)] for r in range(world)]
    with log:
        for _, log.rank in itertools.product(range(CALLS), range(world)):
            begin = log.give("the caller writes", (), operands[log.rank])
            runs[log.rank](*operands[log.rank])
            end = log.give("the caller frees", operands[log.rank][2:], operands[log.rank])
            within = [{one - begin for one in work.after if one >= begin} for work in log.given[begin:]]
            order = before(within)
            assert all(order[i] & 1 for i in range(1, end - begin + 1)), "a graph's stream is not forked"
            assert order[end - begin] == (1 << (end - begin)) - 1, "a graph's stream is not joined"
    takers = {word: [] for word in log.set}
    for number, word in log.taken:
        takers.setdefault(word, []).append(number)
    after = [work.after for work in log.given]
    for word, numbers in takers.items():
        setters = log.set.get(word, [])
        first = setters[:1] == [None]  # of words that are set at first one is left
        assert len(setters) == len(numbers) + first, f"{word} is not set and taken in turn"
        for setter, taker in zip(setters, numbers):
            after[taker] |= {setter} - {None}
    looks = []
    for number, word in log.seen:  # and left to the next one that takes it
        turn = next(i for i, taker in enumerate(takers[word]) if taker > number)
        after[number].add(log.set[word][turn])
        looks.append((number, takers[word][turn]))
    in_one_queue = [set(one) for one in after]
    for rank in range(world):
        own = [work.number for work in log.given if work.rank == rank]
        for one, two in zip(own, own[1:]):
            in_one_queue[two].add(one)
    before(in_one_queue)  # even where streams share a queue of the device, nobody waits in a circle
    order = before(after)
    assert all(order[taker] >> number & 1 for number, taker in looks), "a word may be taken before it is seen"
    for number in (work.number for work in log.given if work.name == "gather" and "beside" in kind):
        now = order[number - 1] | 1 << number - 1
        assert all(now >> one & 1 for one in after[number]), "many programs wait for peers while others need their place"
    for word, setters in log.set.items():  # set again only when it was taken
        assert all(order[later] >> taker & 1 for taker, later in zip(takers[word], setters[1:])), word
    for one, two in itertools.combinations(log.given, 2):
        if not (order[two.number] >> one.number | order[one.number] >> two.number) & 1:
            pairs = [(one.writes, two.writes + two.reads), (one.reads, two.writes)]
            for (memory, bits), (other, others) in itertools.chain(*(itertools.product(*pair) for pair in pairs)):
                assert memory != other or not bits & others, f"ranks {one.rank}, {two.rank}: {one.name} and {two.name}"
    return runs[0]


CASES = [
    (2, 24, 20),
    (3, 36, 20),
    (2, 20, 24),
    (3, 16, 33),
    (3, 2, 8),
    (2, 0, 8),
    (2, 9, 0),
    (1, 8, 8),
    (2, 24, 48),
    (3, 31, 48),
    (2, 6, 37),
]


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_given_to_streams_is_in_order(kind, monkeypatch):
    for name, value in dict(TILE_M=6, TILE_N=3, BLOCK_BYTES=256, MULTIPROCESSORS=4 + stream_costs.SPARE).items():
        monkeypatch.setattr(stream_costs, name, value)
    seen = set()
    for world, M, N in CASES:
        run = checked(kind, world, M, N, monkeypatch)
        if kind == "scatter":
            seen |= {f"beside: {run.beside}" if cuts is None else len(cuts) - 1 for _, _, cuts in run.blocks}
    assert kind != "scatter" or seen == {1, 2, "beside: False", "beside: True"}, seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["follow", "join", "claim", "receive", "publish", "release"])
def test_what_is_missing_is_found(kind, name, monkeypatch):
    monkeypatch.setattr(Stream if hasattr(Stream, name) else Handoffs, name, lambda self, *args, **options: None)
    with pytest.raises(AssertionError):
        checked(kind, 2, 16, 16, monkeypatch)

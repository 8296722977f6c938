"""notify, wait, test, consume_token, put_signal: who has waited sees what was stored before the notify, each time.

Ranks form a ring: each sends to its right neighbour and receives from its left one; alone it is its own neighbour.
"""

import pytest
import torch
import triton_dist
import triton
import triton.language as tl

import triton_dist.language as dl
from triton_dist import shmem

from .refusals import refusal

pytestmark = pytest.mark.dist

POISON = -99
ON_ASCEND = triton_dist.backend == "ascend"
DTYPES = (torch.int32, torch.int64)
OPS = ("set", "add")


def local(shape, dtype=torch.int32, value=POISON):
    return torch.full(shape, value, dtype=dtype, device=shmem.device())


def symmetric(shape, dtype=torch.int32):
    tensor = shmem.aclshmem_create_tensor(shape, dtype)
    tensor.fill_(POISON)
    return tensor


# -- comparisons


@triton.jit
def look(sig, wanted, hits, count, ctx, CMP: tl.constexpr):
    for i in range(0, count):
        hit = dl.test(dl.signal_at(sig, i), tl.load(wanted + i), ctx, CMP)
        tl.store(hits + i, hit.to(tl.int32))


@triton.jit
def send_and_wait(sig, amounts, wanted, tokens, count, ctx, CMP: tl.constexpr, OP: tl.constexpr):
    right = dl.owner_first(1, dl.rank(ctx), dl.num_ranks(ctx))
    for i in range(0, count):
        dl.notify(dl.signal_at(sig, i), right, ctx, tl.load(amounts + i), OP)
    for i in range(0, count):
        token = dl.wait(dl.signal_at(sig, i), tl.load(wanted + i), ctx, CMP)
        tl.store(tokens + i, token)


def comparison_cases(cmp, op, dtype):
    """[(value before, value after, value compared with)]: the comparison is false before and true after."""
    big = 2**31 - 1 if dtype == torch.int32 else 2**63 - 1
    pairs = [(0, 1), (-7, 5), (-big, -3), (3, big), (-2, -1), (big - 1, big), (-big - 1, -big)]
    if op == "set":
        pairs += [(-big - 1, big), (-big - 1, 0)]  # as an add, their difference would not fit
    cases = []
    for low, high in pairs:
        cases.append(
            {
                "ge": (low, high, high),
                "gt": (low, high, low),
                "eq": (low, high, high),
                "ne": (low, high, low),
                "le": (high, low, low),
                "lt": (high, low, high),
            }[cmp]
        )
    return cases


def compare(cmp):
    ctx = shmem.context()
    for dtype in DTYPES:
        for op in OPS:
            before, after, wanted = map(list, zip(*comparison_cases(cmp, op, dtype)))
            count = len(before)
            sig = shmem.create_signals(count, dtype)
            sig[:, 0] = torch.tensor(before, dtype=dtype)
            values = after if op == "set" else [b - a for a, b in zip(before, after)]
            amounts = torch.tensor(values, dtype=dtype, device=sig.device)
            compared = torch.tensor(wanted, dtype=dtype, device=sig.device)
            hits, tokens = local((count,)), local((count,), dtype)
            shmem.barrier_all()
            look[(1,)](sig, compared, hits, count, ctx, CMP=cmp)
            assert hits.cpu().tolist() == [0] * count, f"{cmp}, {dtype}: true before the notify"
            shmem.barrier_all()
            if ON_ASCEND and op == "add" and dtype == torch.int64:
                text = refusal(
                    lambda: send_and_wait[(1,)](sig, amounts, compared, tokens, count, ctx, CMP=cmp, OP=op)  # noqa: B023
                )
                assert "64-bit atomics" in text, text
                continue
            send_and_wait[(1,)](sig, amounts, compared, tokens, count, ctx, CMP=cmp, OP=op)
            assert tokens.cpu().tolist() == after, f"{cmp}, {op}, {dtype}: the token is the value seen"
            assert sig[:, 0].cpu().tolist() == after
            look[(1,)](sig, compared, hits, count, ctx, CMP=cmp)
            assert hits.cpu().tolist() == [1] * count, f"{cmp}, {dtype}: false after the notify"
            assert (sig[:, 1:].cpu() == 0).all(), "a signal has its 64 bytes to itself"


@pytest.mark.parametrize("cmp", ["ge", "gt", "eq", "ne", "le", "lt"])
def test_each_comparison_ends_on_set_and_add_of_both_widths_negative_and_extreme(ranks, cmp):
    ranks(2).run(compare, cmp)


@triton.jit
def by_argument(sig, token_out, value, ctx):
    right = dl.owner_first(1, dl.rank(ctx), dl.num_ranks(ctx))
    dl.notify(sig, right, ctx, value)
    token = dl.wait(sig, value, ctx, "eq")
    tl.store(token_out, token)


def values_as_arguments():
    for dtype, values in ((torch.int32, (1, 16, -5, 2**31 - 1)), (torch.int64, (1, -5, 2**31, 2**40 + 3, -(2**62)))):
        for value in values:
            sig, token = shmem.create_signals(1, dtype), local((1,), dtype)
            by_argument[(1,)](sig, token, value, shmem.context())
            assert token.item() == value


def test_a_signal_carries_any_value_of_its_width_given_as_a_kernel_argument(ranks):
    ranks(2).run(values_as_arguments)


# -- several signals


@triton.jit
def gather_signals(sig, ack, data, wrong, rounds, n, ctx, LANES: tl.constexpr):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    right, left = dl.owner_first(1, me, world), dl.owner_first(world - 1, me, world)
    lanes = tl.arange(0, LANES)
    bad = 0
    for epoch in range(1, rounds + 1):
        for k in range(0, n):
            i = k + (epoch & 1) * (n - 1 - 2 * k)  # first to last, then last to first
            dl.remote_store(data + i * LANES + lanes, epoch * 64 + i, right, ctx)
            dl.notify(dl.signal_at(sig, i), right, ctx, epoch)
        token = dl.wait(sig, epoch, ctx, "ge", n)
        bad += (token != epoch).to(tl.int32)
        for i in range(0, n):
            seen = tl.load(dl.consume_token(data, token) + i * LANES + lanes)
            bad += tl.sum((seen != epoch * 64 + i).to(tl.int32), 0)
            tl.store(data + i * LANES + lanes, -99)
        dl.notify(ack, left, ctx, epoch)
        _ = dl.wait(ack, epoch, ctx)
    tl.store(wrong, bad)


def several_signals():
    for n, rounds in ((1, 8), (2, 8), (3, 8), (33, 3), (40, 3)):
        for dtype in DTYPES:
            sig, ack = shmem.create_signals(n, dtype), shmem.create_signals(1, dtype)
            data, wrong = symmetric((n, 16)), local((1,))
            shmem.barrier_all()
            gather_signals[(1,)](sig, ack, data, wrong, rounds, n, shmem.context(), LANES=16)
            assert wrong.item() == 0, f"n={n}, {dtype}"


@pytest.mark.parametrize("world", [1, 2])
def test_a_wait_for_n_signals_ends_when_the_last_of_them_has_come(ranks, world):
    ranks(world).run(several_signals)


# -- peers that are ahead


@triton.jit
def overshoot(sig, wrong, rounds, ctx):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    right = dl.owner_first(1, me, world)
    if (me & 1) == 0:  # ahead of its neighbour by up to all rounds
        for epoch in range(1, rounds + 1):
            dl.notify(sig, right, ctx, epoch)
    bad = 0
    for epoch in range(1, rounds + 1):
        one = dl.wait(sig, epoch, ctx, "ge")
        two = dl.wait(sig, epoch - 1, ctx, "gt")
        three = dl.wait(sig, 0, ctx, "ne")
        bad += ((one < epoch) | (two < one) | (three < two)).to(tl.int32)
    if (me & 1) == 1:
        for epoch in range(1, rounds + 1):
            dl.notify(sig, right, ctx, epoch)
    tl.store(wrong, bad)


def peer_overshoots():
    for dtype in DTYPES:
        sig, wrong = shmem.create_signals(1, dtype), local((1,))
        overshoot[(1,)](sig, wrong, 300, shmem.context())
        assert wrong.item() == 0
        shmem.barrier_all()
        assert sig[0, 0].item() == 300


@pytest.mark.parametrize("world", [1, 2, 3])
def test_wait_ge_gt_ne_survive_a_fast_peer_and_tokens_never_go_back(ranks, world):
    ranks(world).run(peer_overshoots)


@triton.jit
def flicker(sig, done, wrong, hits, ctx):
    if dl.rank(ctx) == 0:  # two values in turn, never waiting for anybody
        over = dl.test(done, 1, ctx).to(tl.int32)
        while over == 0:
            dl.notify(sig, 1, ctx, 1)
            dl.notify(sig, 1, ctx, 2)
            over = dl.test(done, 1, ctx).to(tl.int32)
    else:
        bad = 0
        for i in range(0, hits):
            want = 1 + (i & 1)
            token = dl.wait(sig, want, ctx, "eq")
            bad += (token != want).to(tl.int32)
        tl.store(wrong, bad)
        dl.notify(done, 0, ctx, 1)


def eq_is_hit_in_passing():
    for dtype in DTYPES:
        sig, done, wrong = shmem.create_signals(1, dtype), shmem.create_signals(1), local((1,), value=0)
        flicker[(1,)](sig, done, wrong, 40, shmem.context())
        assert wrong.item() == 0
        shmem.barrier_all()


def test_the_token_of_wait_eq_is_the_value_hit_although_the_peer_moves_on_at_once(ranks):
    ranks(2).run(eq_is_hit_in_passing)


# -- messages: the data is right in every round


@triton.jit
def messages(data, sig, ack, wrong, first, rounds, ctx, LANES: tl.constexpr):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    right, left = dl.owner_first(1, me, world), dl.owner_first(world - 1, me, world)
    lanes = tl.arange(0, LANES)
    bad = 0
    for epoch in range(first, first + rounds):
        dl.remote_store(data + lanes, lanes + epoch, right, ctx)
        dl.notify(sig, right, ctx, epoch)
        token = dl.wait(sig, epoch, ctx)
        seen = tl.load(dl.consume_token(data + lanes, token))
        bad += tl.sum((seen != lanes + epoch).to(tl.int32), 0)
        tl.store(data + lanes, -99)  # a message that comes late is seen as this
        dl.notify(ack, left, ctx, epoch)
        _ = dl.wait(ack, epoch, ctx)
    tl.store(wrong, bad)


def message_rounds(rounds):
    data, sig, ack, wrong = symmetric((1024,)), shmem.create_signals(1), shmem.create_signals(1), local((1,))
    shmem.barrier_all()
    for first in (1, 1 + rounds):  # the second launch goes on where the first ended
        messages[(1,)](data, sig, ack, wrong, first, rounds, shmem.context(), LANES=1024)
        assert wrong.item() == 0, f"epochs from {first}"


@pytest.mark.parametrize("world, rounds", [(1, 300), (2, 1000), (3, 300)])
def test_every_message_has_arrived_when_its_signal_has(ranks, world, rounds):
    ranks(world).run(message_rounds, rounds)


@triton.jit
def put_messages(dst, src, want, sig, ack, wrong, rounds, n, ctx, BLOCK: tl.constexpr, SPAN: tl.constexpr, OP: tl.constexpr):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    right, left = dl.owner_first(1, me, world), dl.owner_first(world - 1, me, world)
    span = tl.arange(0, SPAN)
    bad = 0
    for r in range(0, rounds):
        value = r + 1
        if OP == "add":
            value = 1
        dl.put_signal(dst, src + r * n, n, sig, right, ctx, value, OP, pid, programs, BLOCK)
        token = dl.wait(sig, (r + 1) * programs, ctx)
        seen = tl.load(dl.consume_token(dst, token) + span, mask=span < n, other=0)
        bad += tl.sum((seen != tl.load(want + r * n + span, mask=span < n, other=0)).to(tl.int32), 0)
        dl.notify(ack, left, ctx, 1, "add")
        _ = dl.wait(ack, (r + 1) * programs, ctx)
    tl.store(wrong + pid, bad)


def put_signal_rounds(rounds):
    me, world = shmem.my_pe(), shmem.pe_count()
    for n, programs, op in ((1000, 1, "set"), (1000, 1, "add"), (1000, 4, "add"), (130, 8, "add"), (1, 2, "add")):

        def message(rank, n=n):
            generator = torch.Generator().manual_seed(1000 * n + rank)
            return torch.randint(-(2**31), 2**31 - 1, (rounds, n), dtype=torch.int32, generator=generator)

        dst, sig, ack, wrong = symmetric((n,)), shmem.create_signals(1), shmem.create_signals(1), local((programs,))
        src, want = message(me).to(dst.device), message((me - 1) % world).to(dst.device)
        shmem.barrier_all()
        put_messages[(programs,)](dst, src, want, sig, ack, wrong, rounds, n, shmem.context(), BLOCK=64, SPAN=1024, OP=op)
        assert wrong.cpu().tolist() == [0] * programs, f"n={n}, {programs} programs, {op}"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_put_signal_split_over_programs_is_complete_when_all_have_signalled(ranks, world):
    ranks(world).run(put_signal_rounds, 25)


@triton.jit
def to_self(data, sig, seen, ctx, LANES: tl.constexpr):
    me = dl.rank(ctx)
    lanes = tl.arange(0, LANES)
    if tl.program_id(0) == 1:
        tl.store(data + lanes, lanes * 3 + me)
        dl.notify(sig, me, ctx, -4)
    else:
        token = dl.wait(sig, -4, ctx, "eq")
        tl.store(seen + lanes, dl.consume_token(tl.load(data + lanes), token))


def notify_self():
    for dtype in DTYPES:
        data, sig, seen = local((128,)), shmem.create_signals(1, dtype), local((128,))
        to_self[(2,)](data, sig, seen, shmem.context(), LANES=128)
        assert torch.equal(seen.cpu(), torch.arange(128, dtype=torch.int32) * 3 + shmem.my_pe())
        assert sig[0, 0].item() == -4


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_signals_itself_from_one_program_to_another(ranks, world):
    ranks(world).run(notify_self)


@triton.jit
def add_many(sig, tokens, turns, total, ctx):
    pid = tl.program_id(0)
    for _turn in range(0, turns):
        for peer in range(0, dl.num_ranks(ctx)):
            dl.notify(sig, peer, ctx, dl.rank(ctx) + pid + 1, "add")
    token = dl.wait(sig, total, ctx)
    tl.store(tokens + pid, token)


def many_writers():
    world, programs, turns = shmem.pe_count(), 4, 60
    total = turns * sum(rank + pid + 1 for rank in range(world) for pid in range(programs))
    for dtype in DTYPES:
        sig, tokens = shmem.create_signals(1, dtype), local((programs,), dtype)
        if ON_ASCEND and dtype == torch.int64:
            text = refusal(lambda: add_many[(programs,)](sig, tokens, turns, total, shmem.context()))  # noqa: B023
            assert "64-bit atomics" in text, text
            continue
        add_many[(programs,)](sig, tokens, turns, total, shmem.context())
        assert tokens.cpu().tolist() == [total] * programs
        shmem.barrier_all()
        assert sig[0, 0].item() == total, "no add was lost or doubled"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_adds_of_all_programs_of_all_ranks_to_one_signal_sum_exactly(ranks, world):
    ranks(world).run(many_writers)


@triton.jit
def ping_pong(sig, last, rounds, ctx):
    peer = 1 - dl.rank(ctx)
    for epoch in range(1, rounds + 1):
        if peer == 1:
            dl.notify(sig, peer, ctx, epoch)
            token = dl.wait(sig, epoch, ctx, "eq")
        else:
            token = dl.wait(sig, epoch, ctx, "eq")
            dl.notify(sig, peer, ctx, epoch)
        tl.store(last, token)


def play_ping_pong(rounds):
    sig, last = shmem.create_signals(1), local((1,))
    ping_pong[(1,)](sig, last, rounds, shmem.context())
    assert last.item() == rounds
    shmem.barrier_all()
    assert sig[0, 0].item() == rounds


def test_ten_thousand_round_trips_in_one_launch_lose_no_signal(ranks):
    ranks(2).run(play_ping_pong, 10_000, timeout=60)


# -- loops of the user's own


@triton.jit
def poll_by_test(data, sig, ack, wrong, rounds, ctx, CMP: tl.constexpr, DRAIN: tl.constexpr):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    right, left = dl.owner_first(1, me, world), dl.owner_first(world - 1, me, world)
    lanes = tl.arange(0, 64)
    bad = 0
    for epoch in range(1, rounds + 1):
        dl.remote_store(data + lanes, lanes + epoch, right, ctx)
        dl.notify(sig, right, ctx, epoch)
        over = dl.test(sig, epoch, ctx, CMP).to(tl.int32)
        while over == 0:
            over = dl.test(sig, epoch, ctx, CMP).to(tl.int32)
        bad += tl.sum((tl.load(data + lanes) != lanes + epoch).to(tl.int32), 0)
        tl.store(data + lanes, -99)
        dl.notify(ack, left, ctx, epoch)
        _ = dl.wait(ack, epoch, ctx)
    tl.store(wrong, bad)


@triton.jit
def poll_by_volatile_load(data, sig, ack, wrong, rounds, ctx, CMP: tl.constexpr, DRAIN: tl.constexpr):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    right, left = dl.owner_first(1, me, world), dl.owner_first(world - 1, me, world)
    lanes, one = tl.arange(0, 64), tl.arange(0, 1)
    bad = 0
    for epoch in range(1, rounds + 1):
        dl.remote_store(data + lanes, lanes + epoch, right, ctx)
        dl.notify(sig, right, ctx, epoch)
        seen = tl.max(tl.load(sig + one, volatile=True), 0)  # a block of one: Ascend caches scalar loads
        while seen < epoch:
            if DRAIN:
                tl.debug_barrier()
            seen = tl.max(tl.load(sig + one, volatile=True), 0)
        _ = dl.wait(sig, epoch, ctx, CMP)  # the acquire, which a volatile load is not
        bad += tl.sum((tl.load(data + lanes) != lanes + epoch).to(tl.int32), 0)
        tl.store(data + lanes, -99)
        dl.notify(ack, left, ctx, epoch)
        done = tl.max(tl.load(ack + one, volatile=True), 0)
        while done < epoch:
            if DRAIN:
                tl.debug_barrier()
            done = tl.max(tl.load(ack + one, volatile=True), 0)
        _ = dl.wait(ack, epoch, ctx, CMP)
    tl.store(wrong, bad)


@triton.jit
def poll_by_atomic(data, sig, ack, wrong, rounds, ctx, CMP: tl.constexpr, DRAIN: tl.constexpr):
    me, world = dl.rank(ctx), dl.num_ranks(ctx)
    right, left = dl.owner_first(1, me, world), dl.owner_first(world - 1, me, world)
    lanes = tl.arange(0, 64)
    bad = 0
    for epoch in range(1, rounds + 1):
        dl.remote_store(data + lanes, lanes + epoch, right, ctx)
        dl.notify(sig, right, ctx, epoch)
        while tl.atomic_add(sig, 0, sem="acquire", scope="sys") < epoch:
            pass
        tl.debug_barrier()
        bad += tl.sum((tl.load(data + lanes) != lanes + epoch).to(tl.int32), 0)
        tl.store(data + lanes, -99)
        dl.notify(ack, left, ctx, epoch)
        while tl.atomic_add(ack, 0, sem="acquire", scope="sys") < epoch:
            pass
        tl.debug_barrier()
    tl.store(wrong, bad)


POLLS = {"test": poll_by_test, "volatile load": poll_by_volatile_load, "atomic add of 0": poll_by_atomic}


def user_written_loop(name, rounds):
    for dtype in DTYPES:
        data, sig, ack = symmetric((64,)), shmem.create_signals(1, dtype), shmem.create_signals(1, dtype)
        wrong = local((1,))
        shmem.barrier_all()
        # Ascend deletes a poll loop without a barrier; on GPUs threads leave the loop at different turns, so none there
        POLLS[name][(1,)](data, sig, ack, wrong, rounds, shmem.context(), CMP="ge", DRAIN=ON_ASCEND)
        assert wrong.item() == 0, f"{name}, {dtype}"


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", list(POLLS))
def test_a_poll_loop_in_the_kernel_sees_signal_and_data(ranks, world, name):
    if ON_ASCEND and name == "atomic add of 0":
        pytest.skip("triton-ascend 3.2 holds a lock around a loop that polls by an atomic; dl.wait polls by a block load")
    ranks(world).run(user_written_loop, name, 60)


@triton.jit
def relay(sig, order, ctx):
    pid = tl.program_id(0)
    if pid > 0:  # program 1 waits for 2, 2 for 3, ...; the last for the left neighbour
        _ = dl.wait(dl.signal_at(sig, pid), 1, ctx)
        dl.notify(dl.signal_at(sig, pid - 1), dl.rank(ctx), ctx, 1)
    else:
        dl.notify(dl.signal_at(sig, tl.num_programs(0) - 1), dl.owner_first(1, dl.rank(ctx), dl.num_ranks(ctx)), ctx, 1)
        token = dl.wait(sig, 1, ctx)
        tl.store(order, token)


def programs_in_a_chain():
    sig, order = shmem.create_signals(8), local((1,))
    relay[(8,)](sig, order, shmem.context())
    assert order.item() == 1


@pytest.mark.parametrize("world", [1, 2, 3])
def test_programs_of_a_grid_that_wait_for_later_ones_all_run(ranks, world):
    ranks(world).run(programs_in_a_chain)


@triton.jit
def token_on_all_kinds(x, y, z, data, sig, ctx, LANES: tl.constexpr):
    lanes = tl.arange(0, LANES)
    right = dl.owner_first(1, dl.rank(ctx), dl.num_ranks(ctx))
    dl.remote_store(data + lanes, lanes * 2.5 + right, right, ctx)
    dl.notify(sig, right, ctx, 1)
    token = dl.wait(sig, 1, ctx)
    tl.store(x + lanes, tl.load(dl.consume_token(data, token) + lanes))  # a pointer
    tl.store(y + lanes, tl.load(dl.consume_token(data + lanes, token)))  # a block of pointers
    tl.store(z + lanes, dl.consume_token(tl.load(data + lanes), token))  # a block of values


def consume_tokens():
    data, sig = symmetric((64,), torch.float32), shmem.create_signals(1)
    out = [local((64,), torch.float32) for _ in range(3)]
    shmem.barrier_all()
    token_on_all_kinds[(1,)](*out, data, sig, shmem.context(), LANES=64)
    want = torch.arange(64) * 2.5 + shmem.my_pe()
    assert all(torch.equal(one.cpu(), want) for one in out)


def test_consume_token_returns_pointers_and_blocks_as_they_are(ranks):
    ranks(2).run(consume_tokens)


# -- refusals


@triton.jit
def notify_with(sig, ctx, OP: tl.constexpr):
    dl.notify(sig, 0, ctx, 1, OP)


@triton.jit
def wait_with(sig, ctx, CMP: tl.constexpr):
    _ = dl.wait(sig, 1, ctx, CMP)


@triton.jit
def ask_with(sig, ctx, CMP: tl.constexpr):
    hit = dl.test(sig, 1, ctx, CMP)
    tl.store(sig, hit.to(sig.dtype.element_ty))


def refused_by_name():
    ctx, sig = shmem.context(), shmem.create_signals(1)
    for op in ("mul", "SET", ""):
        text = refusal(lambda: notify_with[(1,)](sig, ctx, OP=op))  # noqa: B023
        assert "notify" in text and f"{op}" in text and "set" in text and "add" in text, text
    for cmp in ("equal", ">=", "GE"):
        for kernel in (wait_with, ask_with):
            text = refusal(lambda: kernel[(1,)](sig, ctx, CMP=cmp))  # noqa: B023
            assert "cmp" in text and cmp in text and all(name in text for name in ("ge", "gt", "eq", "ne", "le", "lt")), text
    for dtype, name in ((torch.float32, "fp32"), (torch.int16, "int16"), (torch.uint8, "uint8"), (torch.float64, "fp64")):
        wrong = shmem.aclshmem_create_tensor((64,), dtype)
        wrong.zero_()
        for word, launch in (
            ("notify", lambda wrong=wrong: notify_with[(1,)](wrong, ctx, OP="set")),
            ("wait", lambda wrong=wrong: wait_with[(1,)](wrong, ctx, CMP="ge")),
            ("test", lambda wrong=wrong: ask_with[(1,)](wrong, ctx, CMP="ge")),
        ):
            text = refusal(launch)
            assert word in text and name in text and "int32 or int64" in text, text
        assert (wrong.cpu() == 0).all()
    assert (sig.cpu() == 0).all(), "what is refused does nothing"


def test_a_wrong_op_comparison_or_dtype_is_refused_by_name(ranks):
    ranks(1).run(refused_by_name)

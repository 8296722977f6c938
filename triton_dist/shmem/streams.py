"""Work and handoffs between ranks in the order of streams: copies by copy engines, products by libraries, no kernel of ours.

On `nvidia` a `Stream` is a queue of the device beside the current one. On `cpu` whatever is given is done at once, in the
order in which it is given; so what is written with these words runs, and can be tested, there. `ascend`: not available.
"""

import functools

from ..errors import ShmemError
from . import codes, memory, teams, world


class Stream:
    """A stream of this rank's device. `with stream:` makes it the current one.

    Args:
        urgent: its kernels go before those of other streams that wait for a multiprocessor.
    """

    def __init__(self, urgent=False):
        self._stream = world.current("Stream()").heap.stream(urgent)

    def follow(self, mark=None):
        """What is given to it from now on waits for all that the current stream has been given, or had been at `mark`."""
        self._stream.follow(mark)

    def join(self):
        """What the current stream is given from now on waits for all that this one has been given."""
        self._stream.join()

    def mark(self):
        """What the current stream has been given so far, for `follow`: so that work can be given to streams in another order
        than it is done in."""
        return self._stream.mark()

    def __enter__(self):
        self._stream.__enter__()
        return self

    def __exit__(self, *exc):
        self._stream.__exit__(*exc)


def copy(to, source):
    """to = source in the order of the current stream; on `nvidia` by a copy engine, beside kernels that take all
    multiprocessors. (But a contiguous piece within one device may wait for some.)

    Args:
        to, source: [rows, columns], alike in shape and dtype, their rows contiguous and any number of elements apart, none
            within another, in this rank's memory or a peer's (`peer_tensor`). No overlap.
    Errors: ShmemError(-1) when they do not fit.
    """
    made = world.current("copy")
    what = [f"{list(tensor.shape)} {tensor.dtype} with strides {tensor.stride()}" for tensor in (to, source)]
    if not all(map(_rows_apart, (to, source))) or to.shape != source.shape or to.dtype != source.dtype:
        raise ShmemError(
            f"rank {made.rank}: copy: to is {what[0]}, source {what[1]}: give two [rows, columns] alike, contiguous rows apart",
            codes.INVALID_PARAM,
        )
    made.heap.copy(to, source)


def _rows_apart(tensor):
    """Whether it is [rows, columns] with contiguous rows, none of which lies in another."""
    if tensor.dim() != 2 or tensor.stride(1) != 1 and tensor.shape[1] > 1:
        return False
    return tensor.stride(0) >= tensor.shape[1] or tensor.shape[0] <= 1


def recorder():
    """Records work that is given to the current stream and to others that follow and are joined, so that it can be given again
    at once; None where the platform cannot (cpu, ascend).

    Returns an object with `record(give)`, which calls give() without doing the work and returns a function that does it, in the
    order of what is then the current stream, with the same addresses; and `nested()`, whether the current stream is being
    recorded already. What it recorded must not be done at the same time on two streams.
    """
    return world.current("recorder()").heap.recorder()


class Handoffs:
    """Buffers that one rank fills and another empties, turn by turn, each in the order of its current stream.

    Every pair of ranks (writer, reader) of a team has a buffer of `parts` parts. A call:

        writer: claim(reader)            waits until the reader has emptied the buffer (at first it is empty)
                ... writes part p ...
                publish(reader, p)       release: what the stream did before is visible to who receives
        reader: receive(writer, p, ...)  acquire: waits for part p, or for several
                ... reads ...
                release(writer)          all parts may be written again

    idle=True: a multiprocessor is free for it: the device has nothing else to do, or what it does leaves some. On nvidia a
    program then polls, and sees the word within a microsecond or two, or sets it, within three; else no multiprocessor is
    needed, but a word is set after ten, and a wait that began in vain can last 90 longer than it must.

    Each word is 0 or 1, set by one side and taken back by the other, so nothing counts calls, and a captured CUDA graph
    replays right. Every part must be published and received once between claim and release.

    A kernel can wait for a part, too, before the stream receives it: `signals[writer * parts + part]` is 1 from then on.

    Nobody waits in a circle as long as every rank gives the work that others wait for before the waits that this work
    does not need, even where streams share a hardware queue.

    Args:
        parts: of a buffer, 1 or more, equal on all ranks of the team.
        team: team id. Collective over all ranks of the heap.
        signals: num_ranks * (parts + 1) zeroed signals, or more, which stay the caller's; None: made here, see `free`.
        empty: buffers may be claimed at first. False: the reader releases before each turn instead of after it.
    """

    def __init__(self, parts, team=codes.TEAM_WORLD, signals=None, empty=True):
        heap = world.current("Handoffs()").heap
        ranks, me = teams.team_n_pes(team), teams.team_my_pe(team)
        self.signals = memory.create_signals(ranks * (parts + 1)) if signals is None else signals
        # `free` of each reader, behind `full` of each writer and part
        self.signals[ranks * parts : ranks * (parts + 1), 0] = int(empty)
        teams.barrier_all()
        width = self.signals.stride(0) * self.signals.itemsize
        start = [memory.peer_tensor(self.signals, peer, team).data_ptr() for peer in range(ranks)]

        def full(reader, writer, part):
            return start[reader] + (writer * parts + part) * width

        def free(writer, reader):
            return start[writer] + (ranks * parts + reader) * width

        takers = {False: heap.word_taker, True: heap.word_poller}

        def claimer(reader, idle):
            return takers[idle](lambda: f"for rank {reader} to empty rank {me}'s part buffer", free(me, reader))

        def receiver(writer, idle, *some):
            text = f"for part {' and '.join(map(str, some))} of rank {writer}, at rank {me}"
            return takers[idle](lambda: text, *(full(me, writer, part) for part in some))

        self._claim = functools.cache(claimer)
        setters = {False: heap.word_setter, True: heap.word_teller}
        self._publish = functools.cache(lambda reader, part, idle: setters[idle](full(reader, me, part)))
        self._receive = functools.cache(receiver)
        self._release = [heap.word_setter(free(writer, me)) for writer in range(ranks)]

    def claim(self, reader, idle=False):
        self._claim(reader, idle)()

    def publish(self, reader, part, idle=False):
        self._publish(reader, part, idle)()

    def receive(self, writer, *parts, idle=False):
        self._receive(writer, idle, *parts)()

    def release(self, writer):
        self._release[writer]()

    def free(self):
        """Gives signals that were made here back. Collective over all ranks; nothing may be under way."""
        memory.aclshmem_free_tensor(self.signals)

"""Which writes of a kernel are signals, read from its TTIR."""

from .access import Access
from .dataflow import terminator

_BARRIERS = ("gpu.barrier",)
_POLLABLE = ("i32", "i64")
FEW = 32  # lanes of a block that may be signals, one each
# Words of the device language that move data: what they store is no signal even if it is one integer.
_DATA_WORDS = "language/rma.py"


def signals(kernel):
    """The writes that tell another program or rank something: they must come after the data.

    - An atomic that releases (Triton's default).
    - A store of one int32 or int64 right after a barrier, or through the context table (but by a word that moves data),
      or to an argument that the kernel itself polls.
    - Of writes through the context table (but by a word that moves data) that none of the above follows: a store of up to
      FEW int32 or int64, and a relaxed atomic of as many. One that follows announces these too.
    """
    polled = {n for spin in spins(kernel) for n in spin.polled.arguments}
    writes = kernel.writes
    sure = [w for w in writes if _is_signal(kernel, w, polled)]
    last = max((writes.index(w) for w in sure if _releases(w) or _follows_barrier(kernel, w.op)), default=-1)
    return [w for n, w in enumerate(writes) if w in sure or (n > last and _may_be_signal(kernel, w))]


def _releases(write):
    return write.op.name.startswith("tt.atomic") and bool({"release", "acq_rel"} & set(write.op.words))


def _is_signal(kernel, write, polled):
    if write.op.name.startswith("tt.atomic"):
        return _releases(write)
    if write.elements != 1 or write.element not in _POLLABLE:
        return False
    if _follows_barrier(kernel, write.op):
        return True
    if _moves_data(kernel, write):
        return False
    return write.translated or bool(write.arguments & polled)


def _may_be_signal(kernel, write):
    few = write.elements is not None and write.elements <= FEW and write.element in _POLLABLE
    return few and write.translated and not _moves_data(kernel, write)


def _moves_data(kernel, write):
    return any(file.endswith(_DATA_WORDS) for file, _ in kernel.module.places(write.op))


def _follows_barrier(kernel, op):
    ops = op.block.ops
    for before in reversed(ops[: ops.index(op)]):
        if before.name in _BARRIERS:
            return True
        if before in kernel.by_op or before.regions:
            return False
    return False


class Spin:
    """A loop that ends when memory changes: `loop`, an scf.while, and the loads in it that its condition reads."""

    def __init__(self, loop, loads):
        self.loop, self.loads = loop, loads

    @property
    def polled(self) -> Access:
        return self.loads[0]

    @property
    def key(self):
        return self.polled.arguments


def spins(kernel):
    """The loops of a kernel that wait: whose condition reads, in every turn, the same place in global memory."""
    out = []
    for loop in kernel.function.walk():
        if loop.name != "scf.while":
            continue
        ops = set()
        kernel.flow.backward(terminator(loop.regions[0]).operands[:1], within=loop, ops=ops)
        loads = [
            a
            for a in kernel.accesses
            if a.op in ops and a.op.inside(loop) and a.kind not in ("store", "lock", "unlock") and _same_place(a, loop)
        ]
        if loads:
            out.append(Spin(loop, loads))
    return out


def _same_place(access, loop):
    reads = access.flow.backward([access.address], within=loop)
    return not any(value.block is not None and value.block.region.op is loop for value in reads)

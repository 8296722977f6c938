"""Which writes of a kernel are signals, read from its TTIR."""

from .access import Access
from .dataflow import terminator

_BARRIERS = ("gpu.barrier",)
_POLLABLE = ("i32", "i64")
# Words of the device language that move data: what they store is no signal even if it is one integer.
_DATA_WORDS = "language/rma.py"


def signals(kernel):
    """The writes that tell another program or rank something: they must come after the data.

    - An atomic that releases (Triton's default).
    - A store of one int32 or int64 right after a barrier, or through the context table (but by a word that moves data),
      or to an argument that the kernel itself polls.
    """
    polled = {n for spin in spins(kernel) for n in spin.polled.arguments}
    return [w for w in kernel.writes if _is_signal(kernel, w, polled)]


def _is_signal(kernel, write, polled):
    if write.op.name.startswith("tt.atomic"):
        return bool({"release", "acq_rel"} & set(write.op.words))
    if write.elements != 1 or write.element not in _POLLABLE:
        return False
    if _follows_barrier(kernel, write.op):
        return True
    if any(file.endswith(_DATA_WORDS) for file, _ in kernel.module.places(write.op)):
        return False
    return write.translated or bool(write.arguments & polled)


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

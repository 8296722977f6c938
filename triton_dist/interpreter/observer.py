"""What a tool that watches kernels is told of. `scheduler.observer` is None, or an object with these methods.

Each is called in the thread of the program, right before the thing happens (`*_done`: right after), and may let other
programs run. `where` is an Affine of addresses (all lanes, none masked off) or a flat uint64 array of them; sizes are
bytes of one lane. Addresses are not checked yet: a wrong one is refused after the call.

    launching(tensors)                    a launch, before its programs: [(label, address, bytes)] of its tensor arguments
    program(index, number), program_done(index, number)   a program of the launch begins and ends; number: from 0
    load(where, size, volatile, word)     a read; `word` is the language's word for it ("load", "get", "put", ...)
    load_done()                           the value has been read; of a copy, after its store
    store(where, size, word, sem=None)    a plain write; with sem "relaxed" as many relaxed atomic stores at system scope
    atomic(lanes, size, sem, scope)       read-modify-writes of one word each; sem "relaxed", "acquire", "release" or
                                          "acq_rel", scope "cta", "gpu" or "sys"
    atomic_done(lanes, size, sem, scope, wrote, adds=False)   `wrote` (bool, or an array of one a lane): a failed
                                          compare-and-swap and the addition of nothing write nothing; `adds`: what was
                                          written depends on what was there (add, max, or ...)
    notify(address, size, op)             dl.notify: a release at system scope; op "set" or "add"
    notify_done(address, size, op)
    waiting(wait, size)                   dl.wait begins
    waited(wait, size, sem="acquire", scope="sys")   dl.wait has ended. May make `wait.hit` an earlier value that would have
                                          ended it, too
    test(address, size)                   dl.test
    tested(address, size, hit)            the same, after it has looked: an acquire when `hit`
    fence(complete=False)                 dl.fence; dl.quiet with `complete`
"""

import numpy as np

from .affine import Affine


def sem_name(sem):
    """"relaxed", "acquire", "release" or "acq_rel" of Triton's enumeration."""
    name = getattr(sem, "name", str(sem)).rpartition(".")[2].lower()
    return "acq_rel" if name == "acquire_release" else name


def scope_name(scope):
    """"cta", "gpu" or "sys" of Triton's enumeration."""
    name = getattr(scope, "name", str(scope)).rpartition(".")[2].lower()
    return {"system": "sys"}.get(name, name)


def lanes_of(addresses, mask):
    """The addresses that an access touches, as a flat array."""
    return addresses.ravel() if mask is None else addresses[np.broadcast_to(mask, addresses.shape)]


def addresses_of(where):
    """A `where` as a flat array."""
    return where.array(np.uint64).ravel() if isinstance(where, Affine) else where

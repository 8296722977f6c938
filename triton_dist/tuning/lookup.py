"""What was measured before for an operator of this library: by the user, else in the tables that come with it."""

import math

from . import buckets, cache, entries, identity, tables


def lookup(operator, key, world, fits=lambda candidate: True):
    """The best measured candidate, a dict of the arguments that the operator's context was made with; None: nothing fits.

    Looks in the user's cache and in the shipped tables for the nearest sizes of the same bucket, the user's first when both
    are as near. This rank's view alone: the caller makes the ranks agree.

    Args:
        operator: its name.
        key: dict of dtype (a name, such as "bfloat16") and sizes, as far as they are known. Where the sizes that are left out
            were measured with several values, the candidate is chosen that is good for all of them.
        world: ranks of the team.
        fits: whether a candidate is possible now.
    """
    device = identity.device_name()
    found = cache.read(operator, device, world, identity.operators_digest()) + tables.shipped(operator, device, world)
    near = buckets.nearest(found, key)
    if not near:
        return None
    candidates = [timing["candidate"] for timing in near[0]["timings"] if fits(timing["candidate"])]
    index = buckets.best([entries.table(entry, candidates) for entry in near])
    return None if index is None else candidates[index]


def measured(operator, key, world):
    """All entries of what `key` has, for a choice by the size of a call, which the key leaves out. As `lookup`."""
    device = identity.device_name()
    found = cache.read(operator, device, world, identity.operators_digest()) + tables.shipped(operator, device, world)
    return [entry for entry in found if buckets.distance(entry["key"], key) is not None]


def crossover(found, size, candidate, apart=(), beyond=0):
    """The largest value of `size` up to which the candidate is the best of what was measured: half way, in octaves, between the
    last entry for which it is and the next one; 0 when it is not the best of the first. None when fewer than two sizes were.

    Args:
        found: entries. candidate: a dict.
        apart: candidates that it is not compared with.
        beyond: the answer where it is the best of all that were measured, if that is more than the largest of them.
    """
    by_size = {}
    for entry in found:
        by_size.setdefault(entry["key"].get(size), entry)  # the user's go first
    if len(by_size) < 2 or not all(map(buckets.is_size, by_size)):
        return None
    last = 0
    for value in sorted(by_size):
        candidates = [timing["candidate"] for timing in by_size[value]["timings"] if timing["candidate"] not in apart]
        index = buckets.best([entries.table(by_size[value], candidates)])
        if index is None or candidates[index] != candidate:
            return int(math.sqrt(last * value))
        last = value
    return max(last, beyond)

"""What was measured before for an operator of this library: by the user, else in the tables that come with it."""

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
    """All entries of the same dtype and buckets as what `key` has, for choices that no single size settles. As `lookup`."""
    device = identity.device_name()
    found = cache.read(operator, device, world, identity.operators_digest()) + tables.shipped(operator, device, world)
    return [entry for entry in found if buckets.distance(entry["key"], key) is not None]

"""Which measured sizes speak for others, and what they say.

An *entry* is what was measured for one key (entries.py). Its key is a dict: whole numbers are sizes, anything else has to be
equal. A size speaks for those of its bucket: two buckets an octave, (2^(k-1), 3 * 2^(k-2)] and (3 * 2^(k-2), 2^k].
"""

import math

ALIKE = {"float16": "bfloat16", "bfloat16": "float16"}  # dtypes that take the same time


def is_size(value):
    return isinstance(value, int) and not isinstance(value, bool)


def bucket(n):
    """The largest size of n's bucket: 1, 2, 3, 4, 6, 8, 12, ..."""
    if n <= 2:
        return n
    octave = 1 << (n - 1).bit_length()
    return octave * 3 // 4 if n <= octave * 3 // 4 else octave


def distance(measured, wanted):
    """Between two keys, in octaves summed over sizes: 0.0 for the same, None when one does not speak for the other. Only what
    is in `wanted` counts: an operator's context may not know all sizes of its calls."""
    total = 0.0
    for name, value in wanted.items():
        other = measured.get(name)
        if is_size(value) and is_size(other):
            if bucket(value) != bucket(other):
                return None
            total += abs(math.log2(max(value, 1) / max(other, 1)))
        elif name == "dtype" and ALIKE.get(value) == other:
            total += 1e-6  # only where nothing was measured with the dtype itself
        elif value != other:
            return None
    return total


def nearest(entries, wanted):
    """The entries that are nearest to the key `wanted`: several where it leaves sizes open. The first one of each key."""
    found = [(distance(entry["key"], wanted), entry) for entry in entries]
    found = [(d, entry) for d, entry in found if d is not None]
    least = min((d for d, _ in found), default=None)
    near = []
    for d, entry in found:
        if d == least and all(entry["key"] != one["key"] for one in near):
            near.append(entry)
    return near


def best(tables):
    """The index of the candidate whose worst ratio to the fastest is the smallest, over all tables and all ways to measure;
    None when none was measured everywhere.

    Args:
        tables: lists of equal length, an item a candidate: {way: microseconds}, None for one that was left out.
    """
    if not tables:
        return None
    rated = [i for i in range(len(tables[0])) if all(table[i] for table in tables)]
    worst = dict.fromkeys(rated, 1.0)
    for table in tables:
        for way in table[rated[0]] if rated else ():
            fastest = min(table[i][way] for i in rated)
            for i in rated:
                worst[i] = max(worst[i], table[i][way] / fastest if fastest else 1.0)
    return min(rated, key=lambda i: (worst[i], i), default=None)

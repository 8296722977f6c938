"""A peer's memory is reached through the context table."""

from collections import Counter

from .result import verdict


def check(ttir, parts):
    """Every load, store and atomic of the TTIR whose address is moved by a word of the context table is in HIVM with an
    address that is moved by such a word, chosen by the same arguments and divided by the same element size; and no
    access goes to a peer that did not."""
    wanted = Counter(a.key for a in ttir.accesses if a.translated)
    example = {a.key: a for a in ttir.accesses}
    divisors = {a.key: a.divisors for a in ttir.accesses}
    found, wrong = Counter(), []
    for part in parts:
        for access in part.accesses:
            if access.translated:
                found[access.key] += 1
                if access.key not in wanted and access.arguments:
                    wrong.append(f"{access} goes to a peer that no access of the TTIR goes to")
                elif divisors.get(access.key, access.divisors) != access.divisors:
                    wrong.append(
                        f"{access} divides the peer's distance by {sorted(access.divisors)}, the TTIR by "
                        f"{sorted(divisors[access.key])}"
                    )
    for key, count in (wanted - found).items():
        wrong.append(
            f"{count} of {wanted[key]} accesses such as {example[key]} of the TTIR have no counterpart in HIVM whose address "
            "is translated by the context table"
        )
    return verdict("remote", wrong, wanted, f"{sum(wanted.values())} accesses at peers, all through the context table")

"""What a meaning check says."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """passed: None when the kernel has nothing that the check is about. reason: names operations and their lines."""

    name: str
    passed: bool | None
    reason: str


def verdict(name, wrong, about, right):
    """A Check: failed for the reasons `wrong`, if any; without a subject when `about` is empty; else passed."""
    if wrong:
        return Check(name, False, "; ".join(wrong))
    if not about:
        return Check(name, None, "nothing of the kind in this kernel")
    return Check(name, True, right)

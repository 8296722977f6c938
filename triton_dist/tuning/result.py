"""What an autotuning found."""

from dataclasses import dataclass


@dataclass
class Timing:
    """A candidate; `microseconds` of one call {way: the slowest rank's median}, or None and the `problem`."""

    candidate: dict
    microseconds: dict | None = None
    problem: str | None = None


@dataclass
class Tuned:
    """What `autotune` found, the same on all ranks.

    best: the candidate. timings: a Timing for each candidate, in their order. baseline: {way: microseconds} or None.
    origin: "measured" or "cache". key: what it holds for. entry: as it lies in the cache (entries.py).
    """

    best: dict
    timings: list
    origin: str
    key: dict
    entry: dict | None = None
    baseline: dict | None = None

    def __str__(self):
        lines = [f"{text_of(self.key)} ({self.origin})"]
        if self.baseline:
            lines.append(f"    baseline {times_text(self.baseline)}")
        for one in self.timings:
            said = times_text(one.microseconds, self.baseline) if one.microseconds else one.problem
            lines.append(f"  {'*' if one.candidate == self.best else ' '} {text_of(one.candidate)} {said}")
        return "\n".join(lines)


def text_of(values):
    return " ".join(f"{name}={text_of(v) if isinstance(v, dict) else v}" for name, v in values.items()) or "as it is"


def times_text(times, baseline=None):
    return ", ".join(
        f"{way} {us:.1f} us" + (f" ({baseline[way] / us:.2f}x)" if baseline and us else "") for way, us in times.items()
    )

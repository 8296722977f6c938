"""autotune: the fastest of several candidates, measured by all ranks alike. See the package's docstring."""

import json

import triton_dist
from triton_dist import shmem
from triton_dist.errors import TuningError

from . import buckets, cache, entries, identity
from .measurement import Measurement
from .result import Timing, Tuned, text_of

WAYS = ("queued", "graph")
PIECE = 2000  # characters that one exchange carries, of a rank


def autotune(
    name, candidates, call, key, *, make_context=None, reset=None, check=None, baseline=None, team=0,
    ways=("queued",), calls=None, samples=9, source=(), cached=True, again=False,
):  # fmt: skip
    """The fastest of `candidates`, the same on all ranks. Collective over the team.

    Every rank runs the same candidates in the same order with the same number of calls. For each, before anybody is timed: all
    ranks make its context, compile its kernels without launching them, and make one call; after each of the three they agree,
    and a candidate that raised on any rank is left out on all. The others are then timed in turn, one sample of each after the
    other. A candidate's time is the slowest rank's median.

    Args (alike on all ranks of the team, but for the functions' own operands):
        name: of what is tuned, part of a file's name.
        candidates: list of dicts (anything JSON), no two alike.
        call: function of a candidate, or of the context that `make_context` made for it: makes one call, launching on the
            current stream. It does not wait for what the kernels do.
        key: dict of what the choice depends on: whole numbers are sizes, and what was measured for sizes in the same
            bucket (see `buckets`) serves, too; other values (dtypes by name, say) have to be equal.
        make_context: function of a candidate; what it makes gets its `free()` called at the end, if it has one. May be
            collective. Contexts of several candidates exist at a time, as far as the symmetric heap holds them.
        reset: function that makes the buffers and signals ready for a call that expects them fresh; called between two
            barriers of all ranks before every sample, which then has one call unless `calls` says more. None: calls follow
            one another as they are.
        check: function of what `call` got, called after its first call has ended; raises when the results are wrong.
        baseline: function without arguments that is timed with the candidates and never chosen.
        team: team id of shmem.
        ways: "queued": calls given to the device one after the other, including the host's time where that is the longer
            one; "graph": replays of a CUDA graph (nvidia). With both, the candidate is best whose worse ratio to the fastest
            is the smallest.
        calls: in a sample. None: as many as take about a millisecond, at most 10, agreed by all ranks.
        samples: the median's, 1 or more.
        source: functions and kernels whose text belongs to the key of the cache: another text, another measurement. Or a
            string in its place.
        cached: whether to use and to write the user's cache. The first rank of the team alone reads and writes it.
        again: whether to measure even what the cache has.

    Returns: a Tuned.
    Errors: ValueError for arguments that cannot be, CollectiveMismatchError when they differ between ranks, TuningError when
    no candidate works: all on all ranks alike. WaitTimeoutError when a call does not end.
    """
    tuning = _Tuning(**locals())
    tuning.agree_on_arguments()
    found = tuning.from_cache()
    return tuning.measured() if found is None else found


class _Tuning:
    def __init__(self, **arguments):
        vars(self).update(arguments)
        self.what = f"autotune({self.name!r})"

    def agree_on_arguments(self):
        problem = self.problem()
        said = [self.candidates, self.key, self.ways, self.calls, self.samples, self.source, self.cached, self.again]
        said += [self.make_context is None, self.reset is None, self.check is None, self.baseline is None]
        text = f"{self.what}, key={self.key}" if problem else f"{self.what}, key={self.key}, of {identity.digest(said)}"
        shmem.check_alike(text, self.team, problem)

    def problem(self):
        """What is wrong with the arguments, or None."""
        if not isinstance(self.name, str) or not identity.slug(self.name):
            return f"name is {self.name!r}: give a word"
        try:
            for name in ("candidates", "key"):
                if json.loads(json.dumps(vars(self)[name])) != vars(self)[name]:
                    raise TypeError("is not the same after a way through JSON")
        except (TypeError, ValueError) as error:
            return f"{name}: {error}: give dicts with strings as names, of numbers, strings, lists and dicts"
        listed = isinstance(self.candidates, list) and all(isinstance(one, dict) for one in self.candidates)
        if not listed or not self.candidates or any(one in self.candidates[:i] for i, one in enumerate(self.candidates)):
            return f"candidates is {self.candidates!r}: give a list of dicts, no two of them alike"
        if not isinstance(self.key, dict):
            return f"key is {self.key!r}: give a dict"
        if isinstance(self.ways, str) or not self.ways or not set(self.ways) <= set(WAYS):
            return f"ways is {self.ways!r}: give some of {WAYS}"
        if "graph" in self.ways and triton_dist.backend != "nvidia":
            return f"ways is {self.ways!r}: the platform {triton_dist.backend} has no graphs"
        if "graph" in self.ways and self.reset is not None:
            return "reset is given: calls that need one cannot be timed in a graph"
        for name, value in (("samples", self.samples), ("calls", 1 if self.calls is None else self.calls)):
            if not buckets.is_size(value) or value < 1:
                return f"{name} is {value!r}: give 1 or more"
        self.ways = list(self.ways)
        try:
            self.source = self.source if isinstance(self.source, str) else identity.source_digest(self.source)
        except (TypeError, OSError) as error:
            return f"source: {error}: give a list of functions and kernels, or a string"
        return None

    def from_cache(self):
        """What the first rank's cache has, or None, the same on all ranks."""
        world, first, found = shmem.team_n_pes(self.team), shmem.team_my_pe(self.team) == 0, None
        names = sorted(set(shmem.gather(f"{self.what}: device", identity.device_name(), self.team)))
        self.device = " + ".join(names)
        if self.again or not self.cached:
            return None
        if first:
            known = cache.read(self.name, self.device, world, self.source)
            near = buckets.nearest([entry for entry in known if self.serves(entry)], self.key)
            found = near[0] if near else None
        entry = self.from_first_rank(found)
        if entry is None:
            return None
        timings = [Timing(one["candidate"], one.get("microseconds"), one.get("problem")) for one in entry["timings"]]
        timings = [next(one for one in timings if one.candidate == candidate) for candidate in self.candidates]
        best = buckets.best([[one.microseconds for one in timings]])
        return Tuned(self.candidates[best], timings, "cache", entry["key"], entry)

    def serves(self, entry):
        """Whether an entry has just these candidates, measured in these ways, and one that works."""
        candidates = [one["candidate"] for one in entry["timings"]]
        same = len(candidates) == len(self.candidates) and all(one in candidates for one in self.candidates)
        times = [one["microseconds"] for one in entry["timings"] if one.get("microseconds")]
        return same and bool(times) and all(set(one) == set(self.ways) for one in times)

    def from_first_rank(self, value):
        """The first rank's value, in as many pieces as it needs."""
        text = json.dumps(value) if shmem.team_my_pe(self.team) == 0 else ""
        length = shmem.gather(f"{self.what}: length", len(text), self.team)[0]
        pieces = [
            shmem.gather(f"{self.what}: piece {start}", text[start : start + PIECE], self.team)[0]
            for start in range(0, length, PIECE)
        ]
        return json.loads("".join(pieces))

    def measured(self):
        """Measures. What is found goes to the first rank's cache."""
        run = Measurement(
            self.what, self.candidates, self.call, self.make_context, self.reset, self.check, self.baseline, self.team,
            self.ways, self.calls, self.samples,
        )  # fmt: skip
        run.run()
        best = buckets.best([[one.microseconds for one in run.timings]])
        said = [[one.microseconds, one.problem] for one in run.timings]
        shmem.check_alike(f"{self.what}: found {identity.digest([best, said])}", self.team)
        if best is None:
            problems = "\n".join(f"  {text_of(one.candidate)}: {one.problem}" for one in run.timings)
            raise TuningError(f"rank {shmem.my_pe()}: {self.what}: no candidate works on all ranks:\n{problems}")
        tuned = Tuned(self.candidates[best], run.timings, "measured", self.key, baseline=run.baseline)
        tuned.entry = entries.make(
            self.name, self.device, shmem.team_n_pes(self.team), self.key, self.source,
            [{name: value for name, value in vars(one).items() if value is not None} for one in run.timings],
        )  # fmt: skip
        if self.cached and shmem.team_my_pe(self.team) == 0:
            cache.write(tuned.entry)
        return tuned

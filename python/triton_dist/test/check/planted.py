"""Plants one bug at a time in every operator, and sees whether the checker reports it.

    python python/triton_dist/test/check/planted.py [--results] [--schedules 12] [--world 3] [--only TEXT]

Every wait and every notify in the kernels of triton_dist.kernels is a place for two bugs. Taken out: a wait becomes
nothing, a notify is not sent, a put_signal becomes a put. Relaxed: the signal is sent and waited for as before, but
without the release of the notify, or the acquire of the wait. So is Triton's own exchange that releases. Every handoff between
streams is taken out, too, and a relaxed store becomes a plain one.

--results turns the reports of missing orders off, and sees instead which of the bugs give a wrong result, a failure or a
hang with weak memory. A relaxed store that is plain is left out: the simulation tears no word."""

import argparse
import ast
import collections
import contextlib
import importlib
import linecache
import sys
import time

import operators

import triton_dist  # noqa: F401
import triton
import triton.language as tl
import triton_dist.language as dl

REMOVED = {"wait": "0", "notify": "None", "notify_all": "None", "put_signal": None, "barrier_all": "None"}
HANDOFFS = ("claim", "publish", "receive", "release")  # methods of a shmem.Handoffs
STORES = ("remote_store", "store_relaxed")
RELEASING = "atomic_xchg"


@triton.jit
def relaxed_wait(sig, value, ctx, cmp: tl.constexpr = "ge", n=1):
    tl.static_assert(cmp == "ge")
    token = tl.load(sig, volatile=True)
    for i in range(n):
        token = tl.load(dl.signal_at(sig, i), volatile=True)
        while token < value:
            token = tl.load(dl.signal_at(sig, i), volatile=True)
    return token


@triton.jit
def relaxed_notify(sig, peer, ctx, value=1, op: tl.constexpr = "set"):
    word = tl.cast(value, sig.dtype.element_ty)
    if op == "set":
        tl.atomic_xchg(dl.symm_at(sig, peer, ctx), word, sem="relaxed", scope="sys")
    else:
        tl.atomic_add(dl.symm_at(sig, peer, ctx), word, sem="relaxed", scope="sys")


@triton.jit
def relaxed_notify_all(sig, ctx, value=1, op: tl.constexpr = "set"):
    for peer in range(dl.num_ranks(ctx)):
        relaxed_notify(sig, peer, ctx, value, op)


@triton.jit
def relaxed_put_signal(
    dst, src, n, sig, peer, ctx, value=1, op: tl.constexpr = "set", pid=0, num_pids=1, BLOCK: tl.constexpr = 1024
):
    dl.put(dst, src, n, peer, ctx, pid, num_pids, BLOCK)
    relaxed_notify(sig, peer, ctx, value, op)


@triton.jit
def relaxed_barrier_all(sig, ctx):
    world = dl.num_ranks(ctx)
    own = dl.signal_at(sig, world)
    epoch = tl.load(own) + 1
    tl.store(own, epoch)
    relaxed_notify_all(dl.signal_at(sig, dl.rank(ctx)), ctx, epoch)
    relaxed_wait(sig, epoch, ctx, "ge", world)


RELAXED = {f"relaxed_{word}": globals()[f"relaxed_{word}"] for word in REMOVED}

# operator programs (of operators.py) that run a file's kernels
FILES = {
    "allgather_gemm": ["allgather_gemm"],
    "gemm_reduce_scatter": ["gemm_reduce_scatter", "gemm_allreduce one_shot", "gemm_allreduce two_shot"],
    "gemm_allreduce": ["gemm_allreduce one_shot", "gemm_allreduce two_shot"],
    "all_reduce": ["all_reduce mesh", "all_reduce two_shot", "all_reduce ring"],
    "all_reduce_flagged": ["all_reduce flagged"],
    "all_reduce_sentinel": ["all_reduce sentinel"],
    "all_reduce_pipelined": ["all_reduce pipelined"],
    "allgather_gemm_streams": ["allgather_gemm streams", "allgather_gemm streams, the rest at once"],
    "gemm_reduce_scatter_tma": ["gemm_reduce_scatter tma", "gemm_allreduce tma"],
    "gemm_reduce_scatter_columns": ["gemm_reduce_scatter columns", "gemm_allreduce columns"],
    "gemm_allreduce_tma": ["gemm_allreduce tma"],
    "gemm_allreduce_columns": ["gemm_allreduce columns"],
    "all_gather": ["all_gather"],
    "reduce_scatter": ["reduce_scatter"],
    "broadcast": ["broadcast"],
    "barrier": ["barrier"],
    "all_to_all": ["all_to_all"],
    "sequence_all_to_all": ["sequence_all_to_all"],
    "qkv_all_to_all": ["qkv_all_to_all"],
    "moe_dispatch_gather": ["moe gather", "moe gather tokens"],
    "moe_dispatch_roles": ["moe pipelined", "moe pipelined tokens"],
    "moe_dispatch_pipelined": ["moe pipelined"],
    "moe_dispatch_pipelined_tokens": ["moe pipelined tokens"],
    "moe_combine": ["moe gather"],
    "moe_combine_pipelined": ["moe pipelined"],
}


class Plant:
    """A call in an operator's source that is taken out, made `relaxed`, or, a relaxed store, made a plain one."""

    def __init__(self, name, path, source, node, word, relaxed=False):
        self.name, self.path, self.word, self.line, self.relaxed = name, path, word, node.lineno, relaxed
        lines = source.splitlines(keepends=True)
        start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
        end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
        text, new = source[start:end], REMOVED.get(word, "None")
        if relaxed and word == RELEASING:
            new = text.replace('sem="release"', 'sem="relaxed"')
            assert new != text, text
        elif relaxed:
            new = text.replace(f"dl.{word}", f"relaxed_{word}", 1)
        elif word in STORES:
            given = [ast.get_source_segment(source, one) for one in node.args]
            given += [f"{one.arg}={ast.get_source_segment(source, one.value)}" for one in node.keywords if one.arg != "sem"]
            new = f"{'dl.remote_store' if word == 'remote_store' else 'tl.store'}({', '.join(given)})"
        elif new is None:  # put_signal(dst, src, n, sig, peer, ctx, value, op, pid, num_pids, BLOCK)
            given = [ast.get_source_segment(source, one) for one in node.args]
            new = f"dl.put({', '.join(given[:3] + given[4:6] + given[8:])})"
        if text.count("\n") > new.count("\n"):  # the call spans lines: keep it one expression
            new = f"({new}" + "\n" * text.count("\n") + ")"
        self.source = source[:start] + new + source[end:]

    def __str__(self):
        return f"{self.name}.py:{self.line} {self.word}" + (" relaxed" if self.relaxed else "")


def plants(name):
    """All of a module of the kernels: first those that are taken out."""
    path = importlib.util.find_spec(f"triton_dist.kernels.{name}").origin
    with open(path) as file:
        source = file.read()
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        word, owner = node.func.attr, ast.unparse(node.func.value)
        releases = word == RELEASING and 'sem="release"' in ast.get_source_segment(source, node)
        if (word in REMOVED and owner == "dl") or (releases and owner == "tl"):
            found += [Plant(name, path, source, node, word, relaxed) for relaxed in (False, True)]
        store = word == "store_relaxed" or (word == "remote_store" and any(one.arg == "sem" for one in node.keywords))
        if (word in HANDOFFS and owner.endswith("handoffs")) or (store and owner.startswith("dl")):
            found.append(Plant(name, path, source, node, word))
    return sorted(found, key=lambda plant: (plant.relaxed, plant.line))


@contextlib.contextmanager
def planted(plant):
    """The module's kernels and classes are those of the changed source."""
    real = sys.modules[f"triton_dist.kernels.{plant.name}"]
    path = plant.path.replace(".py", f".{'relaxed' if plant.relaxed else 'without'}_{plant.word}_{plant.line}.py")
    linecache.cache[path] = len(plant.source), None, plant.source.splitlines(keepends=True), path
    names = {"__name__": real.__name__, "__file__": path, "__package__": real.__package__, **RELAXED}
    exec(compile(plant.source, path, "exec"), names)
    kind = type(operators.module("barrier").barrier_kernel)
    kernels = {n: v for n, v in vars(real).items() if isinstance(v, (kind, type))}
    users = [m for n, m in sys.modules.items() if n.startswith("triton_dist.kernels.")]
    changed = []
    for name, kernel in kernels.items():
        for user in users:  # kernels are shared between files
            if vars(user).get(name) is kernel and getattr(kernel, "fn", kernel).__module__ == real.__name__:
                changed.append((user, name, kernel))
                setattr(user, name, names[name])
    assert changed, plant
    try:
        yield
    finally:
        for user, name, kernel in changed:
            setattr(user, name, kernel)
        del linecache.cache[path]


def try_plant(plant, world, schedules, **options):
    """The Reports of the programs that run the plant's file, up to the first with a finding. Few schedules of all come first:
    not every program runs the planted line."""
    reports = []
    with planted(plant):
        for some in (min(3, schedules), schedules):
            for program in FILES[plant.name]:
                reports.append(operators.explore(program, world, some, **options))
                if not reports[-1].ok:
                    return reports
    return reports


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", action="store_true", help="instead: wrong results with weak memory, nothing else reported")
    parser.add_argument("--schedules", type=int, help="of each program (default 12, 51 with --results)")
    parser.add_argument("--world", type=int, default=3)
    parser.add_argument("--only", default="", help="only files whose name has this in it")
    parser.add_argument("-v", action="store_true", help="print the reports")
    args = parser.parse_args()
    options = dict(weak=True, races=False) if args.results else {}
    limit = args.schedules or (51 if args.results else 12)
    print("| planted | found | schedules until then | s |\n|---|---|---|---|", flush=True)
    total, found = collections.Counter(), collections.Counter()
    for name in FILES:
        for plant in plants(name) if args.only in name else ():
            if args.results and plant.word in STORES:
                continue
            began = time.perf_counter()
            reports = try_plant(plant, args.world, limit, **options)
            kinds = ", ".join(reports[-1].kinds) or "NOTHING"
            total[name, plant.relaxed] += 1
            found[name, plant.relaxed] += not reports[-1].ok
            schedules = sum(report.schedules for report in reports)
            print(f"| {plant} | {kinds} | {schedules} | {time.perf_counter() - began:.1f} |", flush=True)
            if args.v:
                print(reports[-1])
    print("\n| file | taken out | found | relaxed | found |\n|---|---|---|---|---|")
    for name in dict.fromkeys(name for name, _ in total):
        print(f"| {name} | " + " | ".join(f"{total[name, x]} | {found[name, x]}" for x in (False, True)) + " |")
    print(f"{found.total()} of {total.total()} planted bugs " + ("give a wrong result" if args.results else "reported"))
    sys.exit(0 if args.results or found == total else 1)


if __name__ == "__main__":
    main()

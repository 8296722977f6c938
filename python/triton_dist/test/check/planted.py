"""Plants one bug at a time in every operator, and sees whether the checker reports it.

    python python/triton_dist/test/check/planted.py [--schedules 12] [--world 3] [--only TEXT]

Every wait and every notify in the kernels of triton_dist.kernels is taken
out, one at a time: a wait becomes nothing, a notify is not sent, a put_signal becomes a put. So is every handoff between
streams; and a relaxed store becomes a plain one."""

import argparse
import ast
import contextlib
import importlib
import linecache
import sys
import time

import operators

import triton_dist  # noqa: F401

REMOVED = {"wait": "0", "notify": "None", "notify_all": "None", "put_signal": None, "barrier_all": "None"}
HANDOFFS = ("claim", "publish", "receive", "release")  # methods of a shmem.Handoffs
RELAXED = ("remote_store", "store_relaxed")

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
    "gemm_reduce_scatter_streams": ["gemm_reduce_scatter streams", "gemm_reduce_scatter added", "gemm_allreduce streams"],
    "gemm_allreduce_tma": ["gemm_allreduce tma"],
    "gemm_allreduce_streams": ["gemm_allreduce streams"],
    "all_gather": ["all_gather"],
    "reduce_scatter": ["reduce_scatter"],
    "broadcast": ["broadcast"],
    "barrier": ["barrier"],
    "all_to_all": ["all_to_all"],
    "sequence_all_to_all": ["sequence_all_to_all"],
    "qkv_all_to_all": ["qkv_all_to_all"],
    "moe_dispatch_gather": ["moe gather"],
    "moe_dispatch_pipelined": ["moe pipelined"],
    "moe_combine": ["moe gather"],
    "moe_combine_pipelined": ["moe pipelined"],
}


class Plant:
    """A call in an operator's source that is taken out, or made a plain one."""

    def __init__(self, name, path, source, node, word):
        self.name, self.path, self.word, self.line = name, path, word, node.lineno
        lines = source.splitlines(keepends=True)
        start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
        end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
        new = REMOVED.get(word, "None")
        if word in RELAXED:
            given = [ast.get_source_segment(source, one) for one in node.args]
            given += [f"{one.arg}={ast.get_source_segment(source, one.value)}" for one in node.keywords if one.arg != "sem"]
            new = f"{'dl.remote_store' if word == 'remote_store' else 'tl.store'}({', '.join(given)})"
        elif new is None:  # put_signal(dst, src, n, sig, peer, ctx, value, op, pid, num_pids, BLOCK)
            given = [ast.get_source_segment(source, one) for one in node.args]
            new = f"dl.put({', '.join(given[:3] + given[4:6] + given[8:])})"
        text = source[start:end]
        self.source = source[:start] + new + "\n" * text.count("\n") + source[end:]
        if text.count("\n"):  # the call spans lines: keep it one expression
            self.source = source[:start] + f"({new}" + "\n" * text.count("\n") + ")" + source[end:]

    def __str__(self):
        return f"{self.name}.py:{self.line} {self.word}"


def plants(name):
    """All of a module of the kernels."""
    path = importlib.util.find_spec(f"triton_dist.kernels.{name}").origin
    with open(path) as file:
        source = file.read()
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            word, owner = node.func.attr, ast.unparse(node.func.value)
            relaxed = word == "store_relaxed" or any(one.arg == "sem" for one in node.keywords)
            if (
                (word in REMOVED and owner == "dl")
                or (word in HANDOFFS and owner.endswith("handoffs"))
                or (word in RELAXED and owner.startswith("dl") and relaxed)
            ):
                found.append(Plant(name, path, source, node, word))
    return sorted(found, key=lambda plant: plant.line)


@contextlib.contextmanager
def planted(plant):
    """The module's kernels and classes are those of the changed source."""
    real = sys.modules[f"triton_dist.kernels.{plant.name}"]
    path = plant.path.replace(".py", f".without_{plant.word}_{plant.line}.py")
    linecache.cache[path] = len(plant.source), None, plant.source.splitlines(keepends=True), path
    names = {"__name__": real.__name__, "__file__": path, "__package__": real.__package__}
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


def try_plant(plant, world, schedules):
    """The Reports of the programs that run the plant's file, up to the first with a finding."""
    reports = []
    with planted(plant):
        for program in FILES[plant.name]:
            reports.append(operators.explore(program, world, schedules))
            if not reports[-1].ok:
                break
    return reports


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=12)
    parser.add_argument("--world", type=int, default=3)
    parser.add_argument("--only", default="", help="only files whose name has this in it")
    parser.add_argument("-v", action="store_true", help="print the reports")
    args = parser.parse_args()
    print("| removed | found | schedules until then | s |\n|---|---|---|---|", flush=True)
    missed = total = 0
    for name in FILES:
        for plant in plants(name) if args.only in name else ():
            began = time.perf_counter()
            reports = try_plant(plant, args.world, args.schedules)
            kinds = ", ".join(reports[-1].kinds) or "MISSED"
            missed += reports[-1].ok
            total += 1
            schedules = sum(report.schedules for report in reports)
            print(f"| {plant} | {kinds} | {schedules} | {time.perf_counter() - began:.1f} |", flush=True)
            if args.v:
                print(reports[-1])
    print(f"{total - missed} of {total} planted bugs reported")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

"""Lowers Triton kernels for an Ascend NPU, on a machine that has none, and checks what came out.

    python -m third_party.ascend.lower path.py:kernel --signature 'x: *fp16, n: i32, ctx: *i64' --constexpr BLOCK=64
    python -m third_party.ascend.lower path.py:kernel --signature '*fp16, i32, *i64' --constexpr BLOCK=64
    python -m third_party.ascend.lower --all

Run it from the root of a clone. The first run makes the Ascend toolchain's own virtual environment.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from . import pool
from .arguments import constant_of, signature_of
from .cases import Case, all_cases
from .chips import CHIPS, SIMT_CHIP
from .toolchain import ToolchainError

EXIT_RIGHT, EXIT_WRONG, EXIT_USAGE, EXIT_NO_TOOLCHAIN = 0, 1, 2, 3


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give 1 or more")
    return int(text)


def writable(folder):
    """A folder of that name, made if need be; ArgumentTypeError when nothing can be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{folder!r}: no IR can be written there: {error.strerror}") from None


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m third_party.ascend.lower",
        description=__doc__.split("\n\n")[0],
        epilog="Exit status: 0 every kernel is right, 1 some are not, 2 wrong arguments, 3 no toolchain. See docs/ascend.md.",
    )
    parser.add_argument("kernel", nargs="?", help="path.py:kernel, a triton.jit function")
    parser.add_argument(
        "--signature", type=signature_of, default={}, metavar="TYPES",
        help="types of the parameters that are no constants: in order, or as 'name: type'. *fp16 is a pointer",
    )  # fmt: skip
    parser.add_argument(
        "--constexpr", type=constant_of, action="append", default=[], metavar="NAME=VALUE",
        help="a constexpr, or another argument to compile in: 64, True, tl.float16, a word; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--all", nargs="?", const="", metavar="WORD",
        help="instead of a kernel: every word, operator and tutorial of this library; WORD: those with it in their name",
    )  # fmt: skip
    parser.add_argument("--chip", choices=(*CHIPS, SIMT_CHIP), default=CHIPS[0], help="default %(default)s")
    parser.add_argument(
        "--option", type=constant_of, action="append", default=[], metavar="NAME=VALUE",
        help="an option of triton-ascend's compiler, such as multibuffer=False; may be repeated",
    )  # fmt: skip
    parser.add_argument("--emit", type=writable, metavar="DIR", help="write the IR of every stage into this folder")
    parser.add_argument("--jobs", type=positive, metavar="N", help="kernels at a time; default: one a core")
    parser.add_argument("--verbose", action="store_true", help="the compiler's whole log of what failed")
    args = parser.parse_args(arguments)
    if (args.kernel is None) == (args.all is None):
        parser.error("give path.py:kernel, or --all")
    if args.kernel and ":" not in args.kernel:
        parser.error(f"{args.kernel!r}: give path.py:kernel")
    return args


def cases_of(args):
    if args.all is not None:
        return [case for case in all_cases() if args.all in case.name]
    path, _, kernel = args.kernel.rpartition(":")
    return [Case(kernel, f"{Path(path).absolute()}:{kernel}", args.signature, dict(args.constexpr))]


def table(results):
    """The lines of the table: kernel, stage reached, each check by name."""
    checks = list(dict.fromkeys(name for result in results for name, _, _ in result.checks))
    rows = [("kernel", "stage", *checks)]
    for result in results:
        found = {name: passed for name, passed, _ in result.checks}
        stage = "refused" if result.case.refused is not None and not result.failures else result.stage
        words = {True: "passed", False: "FAILED", None: "-"}
        rows.append((result.case.name, stage, *(words[found.get(name)] for name in checks)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def counts(results):
    """What became of the cases, in words."""
    right = [result for result in results if not result.failures]
    refused = sum(result.case.refused is not None for result in right)
    text = f"{len(right)} of {len(results)} right ({len(right) - refused} to final HIVM, {refused} refused by name"
    return f"{text}; {len(results) - len(right)} wrong)" if len(right) < len(results) else f"{text})"


def main(arguments=None):
    args = parse(arguments)
    cases = cases_of(args)
    if not cases:
        print(f"no case has {args.all!r} in its name", file=sys.stderr)
        return EXIT_USAGE
    begun = time.monotonic()
    try:
        results = pool.run(cases, args.chip, dict(args.option), args.emit, args.jobs)
    except ToolchainError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_NO_TOOLCHAIN
    said = {result.error for result in results}
    if len(said) == 1 and results[0].usage:  # wrong for all of them, such as an option's name
        print(f"error: {results[0].error}", file=sys.stderr)
        return EXIT_USAGE
    print("\n".join(table(results)))
    if args.chip == SIMT_CHIP:
        print(f"\nThe meaning checks read the HIVM of {', '.join(CHIPS)}: on {SIMT_CHIP} nothing was checked.")
    wrong = [result for result in results if result.failures]
    for result in wrong:
        print(f"\n{result.case.name} ({result.case.source}):")
        print("\n".join(f"  {line}" for line in result.failures))
        if args.verbose and result.log:
            print(result.log)
    print(f"\n{args.chip}: {counts(results)} in {time.monotonic() - begun:.0f} s")
    if args.emit:
        print(f"IR: {sum(len(result.emitted) for result in results)} files in {args.emit}")
    return EXIT_WRONG if wrong else EXIT_RIGHT


if __name__ == "__main__":
    sys.exit(main())

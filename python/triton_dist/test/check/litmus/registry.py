"""The list of litmus programs. Each is a function that a rank runs, with the verdict that the checker must give."""

from dataclasses import dataclass, field

CASES = []


@dataclass
class Case:
    """`verdict`: kinds of findings, of which at least one must be found; none: it is right, and nothing may be found."""

    name: str
    group: str
    program: object
    args: tuple
    verdict: tuple
    options: dict = field(default_factory=dict)


def case(name, *verdict, args=(), **options):
    """Decorates a program. `options` are those of `check.explore` (world_size is 2 unless it is given)."""

    def add(program):
        options.setdefault("world_size", 2)
        options.setdefault("heap_bytes", 1 << 20)
        group = program.__module__.rpartition(".")[2].removeprefix("litmus_")
        CASES.append(Case(f"{group}/{name}", group, program, args, verdict, options))
        return program

    return add


def cases(program, table):
    """Many cases of one program: {name: (verdict kinds ..., {options})}; the name is the program's argument."""
    for name, verdict in table.items():
        options = verdict[-1] if verdict and isinstance(verdict[-1], dict) else {}
        kinds = verdict[:-1] if options else verdict
        case(f"{program.__name__}-{name}", *kinds, args=(name,), **dict(options))(program)

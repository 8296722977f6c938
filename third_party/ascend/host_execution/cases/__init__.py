"""What is run: CASES, {name: function of a seed}. A rank calls the function, with shmem initialised and the engine installed;
it returns [(what, got, expected, tolerance)], tensors of one shape and the largest difference that is right (0: equal bits).
"""

from . import atomics, barriers, memory, operators, signals

CASES = {**memory.CASES, **signals.CASES, **atomics.CASES, **barriers.CASES, **operators.CASES}

"""What tuning needs to know of an operator: its sizes, candidates, operands, a call, a check, what it is compared with."""

import torch
import torch.distributed as dist

from triton_dist import shmem
from triton_dist.kernels.arguments import name_of

# newer torch has new names for these
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ERROR = {2: 2e-2, 4: 1e-4}  # relative to the norm, by itemsize: far above rounding, far below what a wrong tile makes


def random(shape, dtype, device, *seed):
    """The same on every rank that asks with the same seed."""
    number = 0
    for part in seed:
        number = number * 1009 + part
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(number), device=device).to(dtype)


class Tunable:
    """An operator for one shape. `sizes`: names of the numbers that a shape has. `call(context)` makes one call,
    `check(context)` looks at its result, of a context made by `make_context(candidate)`, one of `candidates()`. `baseline()`,
    if `compared`: the same by torch.distributed."""

    sizes, compared = (), True

    def __init__(self, shape, dtype, team):
        self.shape, self.dtype, self.team = shape, dtype, team
        self.rank, self.world, self.device = shmem.team_my_pe(team), shmem.team_n_pes(team), shmem.device()

    def key(self):
        return dict(dtype=name_of(self.dtype), **dict(zip(self.sizes, self.shape)))

    def poison(self):
        self.out.fill_(float("nan"))

    def check(self, context):
        """The last call's result against `expected()`."""
        found, expected = self.out.float(), self.expected().float()
        if expected.numel():
            error = ((found - expected).norm() / expected.norm().clamp_min(1e-30)).item()
            if not error < ERROR[self.dtype.itemsize]:  # NaN, too
                raise AssertionError(f"the result is wrong: relative error {error:.3g}")
        self.poison()

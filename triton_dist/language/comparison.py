"""The comparisons of `wait` and `test`."""

import triton
import triton.language as tl


@triton.jit
def pending(seen, value, cmp: tl.constexpr):
    """Whether `seen <cmp> value` is false; refuses a cmp that is none."""
    if cmp == "ge":
        return seen < value
    elif cmp == "gt":
        return seen <= value
    elif cmp == "eq":
        return seen != value
    elif cmp == "ne":
        return seen == value
    elif cmp == "le":
        return seen > value
    else:
        tl.static_assert(cmp == "lt", f'dl.wait, dl.test: cmp is "ge", "gt", "eq", "ne", "le" or "lt", not "{cmp}"')
        return seen >= value

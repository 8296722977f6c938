"""Blocks that are kept as formulas instead of arrays: affine integers, rectangular masks, constants.

Nearly every pointer block of a kernel is `base + i * stride_0 + j * stride_1`, and nearly every mask is a rectangle.
Kept so, pointer arithmetic on a 512 x 512 block costs microseconds instead of milliseconds, and a load becomes one
strided copy. Whatever leaves the form is turned into an array; nothing is approximated.
"""

import numpy as np


class Affine:
    """The block `base + sum_k index_k * strides[k]` of exact Python integers."""

    __slots__ = ("base", "strides", "shape")

    def __init__(self, base, strides, shape):
        self.base, self.strides, self.shape = base, tuple(strides), tuple(shape)

    def bounds(self):
        """(smallest, largest) value."""
        low = high = self.base
        for stride, extent in zip(self.strides, self.shape):
            if stride > 0:
                high += stride * (extent - 1)
            else:
                low += stride * (extent - 1)
        return low, high

    def meets(self, size, address, nbytes):
        """Whether an access of `size` bytes at each value touches one of the `nbytes` at `address`."""
        low, _ = self.bounds()
        axes = sorted(((abs(s), n) for s, n in zip(self.strides, self.shape) if s and n > 1), reverse=True)
        reaches = [size + sum(s * (n - 1) for s, n in axes[k + 1 :]) for k in range(len(axes))]

        def search(offset, k):
            if k == len(axes):
                return -nbytes < offset < size
            (stride, extent), reach = axes[k], reaches[k]
            first, last = max(0, (offset - reach) // stride + 1), min(extent - 1, (offset + nbytes - 1) // stride)
            return any(search(offset - i * stride, k + 1) for i in range(first, last + 1))

        return 0 not in self.shape and search(address - low, 0)

    def fits(self, dtype):
        low, high = self.bounds()
        info = np.iinfo(dtype)
        return info.min <= low and high <= info.max

    def array(self, dtype):
        out = np.asarray(self.base % (1 << 64), np.uint64)  # modulo 2^64, which every integer type wraps to
        for axis, (stride, extent) in enumerate(zip(self.strides, self.shape)):
            if stride and extent > 1:
                line = np.arange(extent, dtype=np.uint64) * np.uint64(stride % (1 << 64))
                out = out + line.reshape([-1 if k == axis else 1 for k in range(len(self.shape))])
        return np.array(np.broadcast_to(out, self.shape).astype(dtype))

    def constant(self):
        """The value when all elements are alike, else None."""
        return self.base if not any(s for s, n in zip(self.strides, self.shape) if n > 1) else None

    def shift(self, amount):
        return Affine(self.base + amount, self.strides, self.shape)

    def scale(self, factor):
        return Affine(self.base * factor, [s * factor for s in self.strides], self.shape)

    def plus(self, other, sign=1):
        return Affine(
            self.base + sign * other.base, [s + sign * t for s, t in zip(self.strides, other.strides)], self.shape
        )

    def times(self, other):
        factor = other.constant()
        if factor is not None:
            return self.scale(factor)
        factor = self.constant()
        return None if factor is None else other.scale(factor)

    def expand_dims(self, axis):
        axis = axis % (len(self.shape) + 1)
        strides, shape = list(self.strides), list(self.shape)
        strides.insert(axis, 0)
        shape.insert(axis, 1)
        return Affine(self.base, strides, shape)

    def broadcast(self, shape):
        strides = [0 if n == 1 else s for s, n in zip(self.strides, self.shape)]
        return Affine(self.base, strides, shape)

    def transpose(self, perm):
        return Affine(self.base, [self.strides[p] for p in perm], [self.shape[p] for p in perm])

    def compare(self, other, name):
        """`self name other` as a Rectangle, for name in lt, le, gt, ge; None when it is none."""
        difference = self.plus(other, -1)  # compare with 0
        moving = [k for k, (s, n) in enumerate(zip(difference.strides, difference.shape)) if s and n > 1]
        ranges = [(0, n) for n in difference.shape]
        if len(moving) > 1:
            return None
        if name in ("gt", "ge"):  # d > 0  <=>  -d < 0
            difference, name = difference.scale(-1), {"gt": "lt", "ge": "le"}[name]
        bound = -difference.base + (1 if name == "le" else 0)  # index * stride < bound
        if not moving:
            if bound <= 0:
                ranges = [(0, 0) for _ in ranges]
            return Rectangle(ranges, difference.shape)
        axis = moving[0]
        stride, extent = difference.strides[axis], difference.shape[axis]
        if stride > 0:
            ranges[axis] = (0, min(extent, max(0, -(-bound // stride))))
        else:  # index * -|stride| < bound  <=>  index > -bound / |stride|
            ranges[axis] = (min(extent, max(0, (-bound) // -stride + 1)), extent)
        return Rectangle(ranges, difference.shape)

    def part(self, rectangle):
        """The addresses inside a rectangle."""
        base = self.base + sum(low * s for (low, _), s in zip(rectangle.ranges, self.strides))
        return Affine(base, self.strides, [max(0, high - low) for low, high in rectangle.ranges])


class Rectangle:
    """A boolean block that is true exactly inside `ranges[k] = (first, one past the last)` of every axis."""

    __slots__ = ("ranges", "shape")

    def __init__(self, ranges, shape):
        self.ranges, self.shape = tuple(ranges), tuple(shape)

    def full(self):
        return all(low == 0 and high == n for (low, high), n in zip(self.ranges, self.shape))

    def empty(self):
        return any(high <= low for low, high in self.ranges)

    def slices(self):
        return tuple(slice(low, high) for low, high in self.ranges)

    def array(self, dtype=np.bool_):
        out = np.zeros(self.shape, dtype)
        out[self.slices()] = True
        return out

    def intersect(self, other):
        return Rectangle(
            [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(self.ranges, other.ranges)], self.shape
        )

    def expand_dims(self, axis):
        axis = axis % (len(self.shape) + 1)
        ranges, shape = list(self.ranges), list(self.shape)
        ranges.insert(axis, (0, 1))
        shape.insert(axis, 1)
        return Rectangle(ranges, shape)

    def broadcast(self, shape):
        ranges = []
        for (low, high), old, new in zip(self.ranges, self.shape, shape):
            ranges.append((low, high) if old == new else ((0, new) if high > low else (0, 0)))
        return Rectangle(ranges, shape)

    def transpose(self, perm):
        return Rectangle([self.ranges[p] for p in perm], [self.shape[p] for p in perm])


class Constant:
    """A block of one and the same float; `value` is a numpy array of one element."""

    __slots__ = ("value", "shape")

    def __init__(self, value, shape):
        self.value, self.shape = value, tuple(shape)

    def array(self, dtype):
        return np.full(self.shape, self.value.ravel()[0], dtype)

    def zero(self):
        return not self.value.any()

    def expand_dims(self, axis):
        shape = list(self.shape)
        shape.insert(axis % (len(shape) + 1), 1)
        return Constant(self.value, shape)

    def broadcast(self, shape):
        return Constant(self.value, shape)

    def transpose(self, perm):
        return Constant(self.value, [self.shape[p] for p in perm])


def affine_of(block):
    """The Affine of an array of addresses, or None. One comparison over the block."""
    signed = block.view(np.int64)  # differences of addresses are small
    base = int(signed[(0,) * block.ndim])
    strides = []
    for axis, extent in enumerate(block.shape):
        second = tuple(1 if k == axis else 0 for k in range(block.ndim))
        strides.append(int(signed[second]) - base if extent > 1 else 0)
    form = Affine(base, strides, block.shape)
    return form if np.array_equal(signed, form.array(np.int64)) else None


def rectangle_of(mask):
    """The Rectangle of a boolean array, or None."""
    if mask.all():
        return Rectangle([(0, n) for n in mask.shape], mask.shape)
    if not mask.any():
        return Rectangle([(0, 0) for _ in mask.shape], mask.shape)
    ranges, count = [], 1
    for axis in range(mask.ndim):
        line = np.flatnonzero(mask.any(axis=tuple(k for k in range(mask.ndim) if k != axis)))
        ranges.append((int(line[0]), int(line[-1]) + 1))
        count *= ranges[-1][1] - ranges[-1][0]
    # true outside the rectangle is impossible; inside, every element must be
    return Rectangle(ranges, mask.shape) if int(mask.sum()) == count else None

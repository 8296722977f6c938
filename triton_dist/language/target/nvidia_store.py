"""Relaxed atomic stores on NVIDIA GPUs, as PTX: Triton has none, and its exchanges are done one by one."""

import triton
import triton.language as tl
from triton.language.extra.cuda import num_warps

_WIDEST = 16  # bytes that one thread stores at a time


@triton.constexpr_function
def _code(itemsize, pack):
    """PTX that stores `pack` elements of a thread: in one instruction where they are neighbours, aligned to their size
    together, and none is masked off; else one by one. A vector is as many atomic stores, of no order among one another."""
    kind = f"b{8 * itemsize}"
    ptrs, values, masks = ([f"${part * pack + i}" for i in range(pack)] for part in (1, 2, 3))
    if pack == 1:
        lines = [".reg .pred one;", f"setp.ne.u32 one, {masks[0]}, 0;"]
        lines.append(f"@one st.relaxed.sys.global.{kind} [{ptrs[0]}], {values[0]};")
    else:
        lines = [".reg .pred whole, one;", ".reg .b64 apart, place;", ".reg .b32 all;"]
        lines += [f"and.b64 apart, {ptrs[0]}, {itemsize * pack - 1};", f"mov.b32 all, {masks[0]};"]
        for i in range(1, pack):  # of an aligned pointer, the sum with a smaller number is the exclusive or
            lines += [f"xor.b64 place, {ptrs[0]}, {ptrs[i]};", f"xor.b64 place, place, {itemsize * i};"]
            lines += ["or.b64 apart, apart, place;", f"and.b32 all, all, {masks[i]};"]
        lines += ["setp.eq.u64 whole, apart, 0;", "setp.ne.and.u32 whole, all, 0, whole;"]
        lines.append(f"@whole st.relaxed.sys.global.v{pack}.{kind} [{ptrs[0]}], {{{', '.join(values)}}};")
        for ptr, value, mask in zip(ptrs, values, masks):
            lines += [f"setp.ne.and.u32 one, {mask}, 0, !whole;", f"@one st.relaxed.sys.global.{kind} [{ptr}], {value};"]
    lines += [f"mov.u32 ${i}, 0;" for i in range(pack)]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def _constraints(itemsize, pack):
    value = "r" if itemsize == 4 else "l"
    return ",".join(["=r"] * pack + ["l"] * pack + [value] * pack + ["r"] * pack + [value] * pack)


@triton.constexpr_function
def _pack(itemsize, shape, threads):
    """Neighbours that a thread stores together; 0 for what is left to exchanges."""
    return min(_WIDEST // itemsize, shape[0] // threads) if len(shape) == 1 else 0


@triton.jit
def store_relaxed(ptr, value, mask=None):
    """Stores each element, of 32 or 64 bits, by a relaxed atomic store at system scope.

    Each happens once: a second store of the same value could come after its reader has put another one there. Assembly runs in
    every thread that holds an element, and scalars, small blocks and many blocks of more axes are held by several threads
    each. Those are stored by exchanges whose old values nobody uses: these Triton does once. A block of one axis with an
    element or more a thread gets the layout of a load from its pointers, which gives each element to one thread, and
    neighbours to the same one. That load reads nothing: no grid has fewer than 0 programs.
    """
    ITEMSIZE: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth // 8
    WORD: tl.constexpr = tl.uint32 if ITEMSIZE == 4 else tl.uint64
    value = tl.cast(value, ptr.dtype.element_ty)
    if ptr.type.is_block():
        value = tl.broadcast_to(value, ptr.shape)
    words = ptr.to(tl.pointer_type(WORD), bitcast=True)
    bits = value.to(WORD, bitcast=True)
    PACK: tl.constexpr = _pack(ITEMSIZE, ptr.shape, 32 * num_warps()) if ptr.type.is_block() else 0
    if PACK == 0:
        tl.atomic_xchg(words, bits, mask=mask, sem="relaxed", scope="sys")
    else:
        inside = tl.full(ptr.shape, 1, tl.int1) if mask is None else tl.broadcast_to(mask, ptr.shape)
        held = tl.load(words, mask=inside & (tl.num_programs(0) < 0), other=0)
        tl.inline_asm_elementwise(
            _code(ITEMSIZE, PACK), _constraints(ITEMSIZE, PACK), [words, bits, inside.to(tl.int32), held],
            dtype=tl.int32, is_pure=False, pack=PACK,
        )  # fmt: skip

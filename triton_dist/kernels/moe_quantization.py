"""The fp8 payload of a mixture of experts: e4m3 values with an fp32 scale for each 128 columns of a token."""

import torch
import triton
import triton.language as tl

PAYLOAD_FP8 = torch.float8_e4m3fn
GROUP = 128  # columns that share an fp32 scale
FP8_MAX = 448.0
TINY = 2.0**-100  # a group's largest value counts as at least this: its scale must not vanish

_GROUP, _FP8_MAX, _TINY = tl.constexpr(GROUP), tl.constexpr(FP8_MAX), tl.constexpr(TINY)


@triton.jit
def quantize_tile(tile, T: tl.constexpr, H: tl.constexpr):
    """(values [T, H] in units of their groups' scales, scales [T, H // 128])."""
    grouped = tl.reshape(tile.to(tl.float32), (T, H // _GROUP, _GROUP))
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(grouped), 2), _TINY), tl.full((T, H // _GROUP), _FP8_MAX, tl.float32))
    scaled = tl.div_rn(grouped, tl.broadcast_to(scale[:, :, None], (T, H // _GROUP, _GROUP)))
    return tl.reshape(scaled, (T, H)), scale


def quantize(x):
    """x [n, H] as fp8 and its fp32 scales [n, cdiv(H, 128)], by torch: x ~ payload * scale of the column's group."""
    n, H = x.shape
    groups = -(-H // GROUP)
    wide = torch.nn.functional.pad(x.float(), (0, groups * GROUP - H)).view(n, groups, GROUP)
    largest = wide.abs().amax(2).clamp_min(TINY)
    scale = largest / torch.full_like(largest, FP8_MAX)  # on GPUs torch multiplies by the reciprocal of a number, rounded twice
    payload = (wide / scale[:, :, None]).view(n, groups * GROUP)[:, :H]
    return payload.to(PAYLOAD_FP8), scale

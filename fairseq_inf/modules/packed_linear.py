"""Linear maps for inference in fewer bits, by torch's own kernels for a CPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# N x K a weight, groups of GROUP numbers of a row

BITS = {"float32": 32, "bf16": 16, "int8": 8, "int4": 4}
GROUP = 32
FEW = 8  # rows up to which the kernels of codes are faster than a product in bfloat16


def grid(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The 16 values of each group, lo + c step, and the code c of each number.  Of numbers that are
    on such a grid already, with its ends in use, as those of a Q4_1 file, these are the file's own.
    -> codes, N x K; step, lo: N x K/32"""
    groups = weight.float().unflatten(1, (-1, GROUP))
    lo, hi = groups.amin(dim=-1), groups.amax(dim=-1)
    step = (hi - lo) / 15
    codes = (groups - lo[..., None]) / step.clamp(min=1e-30)[..., None]
    return codes.round().clamp(0, 15).flatten(1), step, lo


def fits(weight: Tensor) -> bool:
    """Whether there is a kernel for a weight in groups."""
    return weight.size(0) % 16 == 0 and weight.size(1) % GROUP == 0


def on_grid(weight: Tensor) -> bool:
    """Whether codes of 4 bits are these very numbers, but for the rounding of a float32."""
    if not fits(weight):
        return False
    codes, step, lo = grid(weight)
    found = codes.unflatten(1, (-1, GROUP)) * step[..., None] + lo[..., None]
    off = (found - weight.float().unflatten(1, (-1, GROUP))).abs()
    return bool((off <= 1e-3 * step[..., None]).all())


class PackedLinear(nn.Module):
    """W x + b with W in bfloat16, and, for a few rows at a time, which cost the reading of W, the
    codes that W was made of: of 8 bits with a scale a row, or of 4 with two numbers a group."""

    codes: Tensor | None
    scales: Tensor | None

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        """bits: 16, 8 or 4"""
        super().__init__()
        weight, self.bits = linear.weight.detach().float(), bits
        codes = scales = None
        if bits == 8:
            scales = (weight.abs().amax(dim=1) / 127).clamp(min=1e-30).bfloat16()
            codes = (weight / scales.float()[:, None]).round().clamp(-127, 127)
            weight = codes * scales.float()[:, None]
            codes = codes.to(torch.int8)
        elif bits == 4:
            found, step, lo = grid(weight)
            # the kernel's grid is zero + (c - 8) step, in bfloat16
            scales = torch.stack([step, lo + 8 * step], dim=-1).bfloat16()  # N x K/32 x 2
            step, zero = scales.float()[..., None].unbind(dim=2)
            weight = ((found.unflatten(1, (-1, GROUP)) - 8) * step + zero).flatten(1)
            scales = scales.transpose(0, 1).contiguous()
            codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(found.int(), 1)
        self.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().bfloat16())
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """... x K -> ... x N"""
        rows = x.numel() // x.size(-1)
        if self.codes is None or rows > FEW or x.device.type != "cpu":
            return F.linear(x, self.weight, self.bias)
        x, shape = x.reshape(rows, -1).contiguous(), x.shape[:-1]
        if self.bits == 8:
            out = torch.ops.aten._weight_int8pack_mm(x, self.codes, self.scales)
        else:
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.codes, GROUP, self.scales)
        return (out if self.bias is None else out + self.bias).view(*shape, -1)


def pack(parts: Iterable[nn.Module], weights: str) -> None:
    """Pack the linear maps among the children of the parts, in place.  weights: of BITS, below 32.
    With int4, maps that a file holds in more bits than the others, and those without a kernel, get
    8."""
    maps = [
        (part, name, linear)
        for part in parts
        for name, linear in part.named_children()
        if type(linear) is nn.Linear
    ]
    bits = [BITS[weights]] * len(maps)
    if weights == "int4":
        held = [on_grid(linear.weight) for _, _, linear in maps]
        coarse = held if any(held) else [fits(linear.weight) for _, _, linear in maps]
        bits = [4 if four else 8 for four in coarse]
    for (part, name, linear), each in zip(maps, bits, strict=True):
        setattr(part, name, PackedLinear(linear, each))

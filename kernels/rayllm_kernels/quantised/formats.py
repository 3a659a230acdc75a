"""Formats in which checkpoints store weights in fewer bits: into plain numbers, into float32, and from it; in torch.

A weight is [N, K], outputs by inputs: scale * (number - zero point), with one scale and one zero point a block of
weights. Blocks begin at the first row and column, and the last ones may be cut off. All results are on the device of
the arguments. What is turned into float32 is exact but for the rounding of the one product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Block = tuple[int | None, int | None]
E4M3_MAX = 448.0


class Numbers(NamedTuple):
    """A weight, or a part of one, as the numbers that are stored.

    values: [N, K], e4m3, int8, or unsigned whole numbers as uint8. scales: float [N, G], of each row and group. zeros:
    the same, of zero points; None for none. groups: int64 [K], the group of each input.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    groups: torch.Tensor

    def part(self, rows: slice, columns: slice) -> Numbers:
        """Those of a rectangle."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return Numbers(self.values[rows, columns], self.scales[rows], zeros, self.groups[columns])

    def dequantised(self) -> torch.Tensor:
        """float32 [N, K]."""
        wide = self.values.float()
        if self.zeros is not None:
            wide = wide - self._spread(self.zeros)
        return self._spread(self.scales) * wide

    def _spread(self, of_groups: torch.Tensor) -> torch.Tensor:
        wide = of_groups.float()
        return wide if wide.shape[1] == 1 else wide[:, self.groups]


def block_numbers(
    values: torch.Tensor, scales: torch.Tensor, block: Block, zeros: torch.Tensor | None = None
) -> Numbers:
    """values [N, K], one number an element.

    block: rows and columns that share a scale, None for all of them. scales, zeros:
    [ceil(N / rows), ceil(K / columns)], with 1 for None.
    """
    (num_rows, num_columns), (rows, columns) = values.shape, block

    def of_rows(blocks: torch.Tensor) -> torch.Tensor:
        if rows is None:
            return blocks.expand(num_rows, -1)
        return blocks if rows == 1 else blocks.repeat_interleave(rows, 0)[:num_rows]

    groups = regular_groups(num_columns, columns, values.device)
    return Numbers(values, of_rows(scales), None if zeros is None else of_rows(zeros), groups)


def regular_groups(num_columns: int, size: int | None, device: torch.device) -> torch.Tensor:
    """The group of each input, where neighbours share one: `size` of them, None for all."""
    return torch.arange(num_columns, device=device) // (size or max(num_columns, 1))


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32 [R, C] to the unsigned numbers of `bits` bits in it, int32, lowest bits first along `dim`.

    bits divides 32: there are 32 / bits as many numbers as words.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    parts = words.unsqueeze(dim + 1) >> (shifts if dim == 1 else shifts[:, None])
    return (parts & ((1 << bits) - 1)).flatten(dim, dim + 1)


def packed_numbers(
    packed: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor, bits: int, zeros: torch.Tensor | None
) -> Numbers:
    """pack-quantized of compressed-tensors.

    packed: int32 [N, ceil(K * bits / 32)] of numbers, which are stored with 2^(bits - 1) added. scales: [N, G].
    groups: int64 [K], the group of each input. zeros: int32 [ceil(N * bits / 32), G], packed along the outputs; None
    for symmetric weights.
    """
    num_rows, num_columns = packed.shape[0], groups.shape[0]
    values = unpack(packed, bits, 1)[:, :num_columns].to(torch.uint8)
    if zeros is None:
        middle = torch.full((1, 1), 1 << (bits - 1), dtype=torch.uint8, device=packed.device)
        return Numbers(values, scales, middle.expand(num_rows, scales.shape[1]), groups)
    return Numbers(values, scales, unpack(zeros, bits, 0)[:num_rows].to(torch.uint8), groups)


def gptq_numbers(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor,
    bits: int,
    *,
    first_form: bool,
) -> Numbers:
    """GPTQ.

    qweight: int32 [K * bits / 32, N]. qzeros: int32 [G, N * bits / 32]. scales: [G, N]. groups: int64 [K], the group of
    each input. first_form: zero points are stored less one. The packer takes it from whole words, so that a zero point
    of 0 borrows from its neighbour; the one is given back to whole words too.
    """
    if first_form:
        qzeros = qzeros + sum(1 << shift for shift in range(0, 32, bits))
    return _turned(unpack(qweight, bits, 0), unpack(qzeros, bits, 1), scales, groups)


# Where in a word AWQ keeps the numbers of eight neighbouring outputs, counted in 4 bits from the lowest.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def awq_numbers(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> Numbers:
    """AWQ for its "gemm" kernels.

    qweight: int32 [K, N / 8] of numbers of 4 bits. qzeros: int32 [G, N / 8]. scales: [G, N]. groups: int64 [K], the
    group of each input.
    """
    values, zeros = (unpack(words, 4, 1).unflatten(1, (-1, 8))[..., AWQ_ORDER] for words in (qweight, qzeros))
    return _turned(values.flatten(1), zeros.flatten(1), scales, groups)


def _turned(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> Numbers:
    """Of values [K, N], zeros and scales [G, N]."""
    return Numbers(values.to(torch.uint8).t(), scales.t(), zeros.to(torch.uint8).t(), groups)


def divided(x: torch.Tensor, number: float) -> torch.Tensor:
    """x / number, rounded to nearest on every device.

    torch on CUDA multiplies by the reciprocal of a Python number, which is off by a unit in the last place for half
    of all x; by a tensor on the device it divides.
    """
    return x / x.new_full((), number)


def e4m3_numbers(weight: torch.Tensor, block: Block) -> Numbers:
    """A weight [N, K] of any floats, rounded to e4m3: the largest number of each block becomes the largest of e4m3."""
    num_rows, num_columns = weight.shape
    rows, columns = block[0] or max(num_rows, 1), block[1] or max(num_columns, 1)
    down, across = -(-num_rows // rows), -(-num_columns // columns)
    wide = torch.nn.functional.pad(weight.float(), (0, across * columns - num_columns, 0, down * rows - num_rows))
    cells = wide.view(down, rows, across, columns)
    peaks = cells.abs().amax((1, 3)).clamp(min=torch.finfo(torch.float32).tiny * E4M3_MAX)
    scales = divided(peaks, E4M3_MAX)
    codes = (cells / scales[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return block_numbers(codes.flatten(2).flatten(0, 1)[:num_rows, :num_columns], scales, block)


def int4_numbers(weight: torch.Tensor, size: int | None, *, symmetric: bool) -> Numbers:
    """A weight [N, K] of any floats, rounded to 4 bits in groups of `size` inputs, None for all."""
    num_rows, num_columns = weight.shape
    size = size or max(num_columns, 1)
    count = -(-num_columns // size)
    parts = torch.nn.functional.pad(weight.float(), (0, count * size - num_columns)).view(num_rows, count, size)
    tiny = torch.finfo(torch.float16).tiny
    if symmetric:
        scales = divided(parts.abs().amax(-1), 7).clamp(min=tiny)
        zeros = torch.full_like(scales, 8)
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scales = divided(high - low, 15).clamp(min=tiny)
        zeros = (-low / scales).round().clamp(0, 15)
    codes = ((parts / scales[..., None]).round() + zeros[..., None]).clamp(0, 15).flatten(1)[:, :num_columns]
    groups = regular_groups(num_columns, size, weight.device)
    return Numbers(codes.to(torch.uint8), scales, zeros.to(torch.uint8), groups)


# Of a sign, two bits of exponent and one of mantissa (OCP Microscaling Formats 1.0).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 to [..., K].

    blocks: uint8 [..., K / 32, 16], two numbers a byte, the lower half first. scales: uint8 [..., K / 32], exponents of
    2 with 127 added.
    """
    numbers = torch.tensor(E2M1, device=blocks.device)[e2m1_codes(blocks).int()]
    return torch.ldexp(numbers.unflatten(-1, (-1, 32)), scales.int()[..., None] - 127).flatten(-2)


def e2m1_codes(blocks: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K / 32, 16] of two numbers a byte, the lower half first, to the numbers from 0 to 15 [..., K]."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3)


def e2m1_numbers(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [..., K] of any floats, rounded to MXFP4: (codes from 0 to 15, uint8, exponents [..., K / 32], uint8).

    A group's exponent is that of its largest number, less the 2 of the largest of e2m1.
    """
    parts = weight.float().unflatten(-1, (-1, 32))
    peaks = parts.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    exponents = torch.floor(torch.log2(peaks)) - 2
    table = torch.tensor(E2M1[:8], device=weight.device)
    borders = (table[1:] + table[:-1]) / 2
    scaled = parts / torch.exp2(exponents)
    codes = torch.bucketize(scaled.abs().contiguous(), borders) + torch.where(scaled < 0, 8, 0)
    return codes.flatten(-2).to(torch.uint8), (exponents.squeeze(-1) + 127).to(torch.uint8)

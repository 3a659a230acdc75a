"""Formats in which checkpoints store weights in fewer bits, turned into float32 in torch.

A weight is [N, K], outputs by inputs: scale * (number - zero point), with one scale and one zero point a block of
weights. Blocks begin at the first row and column, and the last ones may be cut off. All results are float32 on the
device of the arguments, and exact but for the rounding of the one product.
"""

from __future__ import annotations

import torch

Block = tuple[int | None, int | None]


def dequantise_blocks(
    numbers: torch.Tensor, scales: torch.Tensor, block: Block, zeros: torch.Tensor | None = None
) -> torch.Tensor:
    """numbers [N, K], of any dtype, to scales * (numbers - zeros).

    block: rows and columns that share a scale, None for all of them. scales, zeros:
    [ceil(N / rows), ceil(K / columns)], with 1 for None.
    """
    wide = numbers.float()
    if zeros is not None:
        wide = wide - spread(zeros.float(), block, numbers.shape)
    return wide * spread(scales.float(), block, numbers.shape)


def spread(of_blocks: torch.Tensor, block: Block, shape: torch.Size) -> torch.Tensor:
    """[blocks of rows, blocks of columns] to what each number of `shape` [N, K] has; 1 stays where it is for all."""
    for dim, size in enumerate(block):
        if size is not None and size > 1:
            of_blocks = of_blocks.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return of_blocks


def unpack(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32 [R, C] to the unsigned numbers of `bits` bits in it, int32, lowest bits first along `dim`.

    bits divides 32: there are 32 / bits as many numbers as words.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    parts = words.unsqueeze(dim + 1) >> (shifts if dim == 1 else shifts[:, None])
    return (parts & ((1 << bits) - 1)).flatten(dim, dim + 1)


def dequantise_packed(
    packed: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor, bits: int, zeros: torch.Tensor | None
) -> torch.Tensor:
    """pack-quantized of compressed-tensors to [N, K].

    packed: int32 [N, ceil(K * bits / 32)] of numbers, which are stored with 2^(bits - 1) added. scales: [N, G].
    groups: int64 [K], the group of each input. zeros: int32 [ceil(N * bits / 32), G], packed along the outputs; None
    for symmetric weights.
    """
    num_rows, num_columns = packed.shape[0], groups.shape[0]
    numbers = unpack(packed, bits, 1)[:, :num_columns].float()
    middle = float(1 << (bits - 1))
    offset = middle if zeros is None else unpack(zeros, bits, 0)[:num_rows].float()[:, groups]
    return scales.float()[:, groups] * (numbers - offset)


def dequantise_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor,
    bits: int,
    *,
    first_form: bool,
) -> torch.Tensor:
    """GPTQ to [N, K].

    qweight: int32 [K * bits / 32, N]. qzeros: int32 [G, N * bits / 32]. scales: [G, N]. groups: int64 [K], the group of
    each input. first_form: zero points are stored less one. The packer takes it from whole words, so that a zero point
    of 0 borrows from its neighbour; the one is given back to whole words too.
    """
    if first_form:
        qzeros = qzeros + sum(1 << shift for shift in range(0, 32, bits))
    return _by_group(unpack(qweight, bits, 0), unpack(qzeros, bits, 1), scales, groups)


# Where in a word AWQ keeps the numbers of eight neighbouring outputs, counted in 4 bits from the lowest.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def dequantise_awq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    """AWQ for its "gemm" kernels to [N, K].

    qweight: int32 [K, N / 8] of numbers of 4 bits. qzeros: int32 [G, N / 8]. scales: [G, N]. groups: int64 [K], the
    group of each input.
    """
    numbers, zeros = (unpack(words, 4, 1).unflatten(1, (-1, 8))[..., AWQ_ORDER] for words in (qweight, qzeros))
    return _by_group(numbers.flatten(1), zeros.flatten(1), scales, groups)


def _by_group(numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """numbers [K, N], zeros and scales [G, N] -> [N, K]."""
    return (scales.float()[groups] * (numbers - zeros[groups]).float()).t()


# Of a sign, two bits of exponent and one of mantissa (OCP Microscaling Formats 1.0).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantise_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """MXFP4 to [..., K].

    blocks: uint8 [..., K / 32, 16], two numbers a byte, the lower half first. scales: uint8 [..., K / 32], exponents of
    2 with 127 added.
    """
    table = torch.tensor(E2M1, device=blocks.device)
    numbers = table[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()].flatten(-2)
    return torch.ldexp(numbers, scales.int()[..., None] - 127).flatten(-2)

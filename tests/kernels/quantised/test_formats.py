"""Each format, in torch, against numbers written by hand, by numpy and by transformers."""

from __future__ import annotations

import numpy as np
import pytest
import support.quantised as quantised
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rayllm_kernels.quantised import formats


def noise(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def test_every_byte_of_e4m3():
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(16, 16)
    found = formats.block_numbers(numbers, torch.tensor([[0.25]]), (None, None)).dequantised()
    torch.testing.assert_close(found.flatten(), torch.from_numpy(quantised.E4M3) / 4, rtol=0, atol=0, equal_nan=True)


def test_blocks_that_are_cut_off():
    numbers = torch.ones(5, 7, dtype=torch.int8)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    zeros = torch.tensor([[0, 1], [2, 3]], dtype=torch.int8)
    found = formats.block_numbers(numbers, scales, (3, 4), zeros).dequantised()
    rows = [[1.0] * 4 + [0.0] * 3] * 3 + [[-3.0] * 4 + [-8.0] * 3] * 2
    assert found.tolist() == rows


def test_fp8_as_transformers_reads_it():
    tensors, meant = quantised.fp8(noise(256, 384), (128, 128))
    found = formats.block_numbers(tensors["weight"], tensors["weight_scale_inv"], (128, 128)).dequantised()
    theirs = Fp8Dequantize(None).convert(tensors)["weight"]
    theirs = theirs[0] if isinstance(theirs, list) else theirs  # a list up to transformers 5.20
    assert torch.equal(found, theirs)
    assert torch.equal(found, torch.from_numpy(meant))
    powers = torch.tensor([[0.5, 4.0, 2.0**-20]] * 2).to(torch.float8_e8m0fnu)
    found, expected = (formats.block_numbers(tensors["weight"], each, (128, 128)) for each in (powers, powers.float()))
    assert torch.equal(found.dequantised(), expected.dequantised())


def test_mxfp4_as_transformers_reads_it():
    blocks, scales, meant = quantised.mxfp4(noise(3, 10, 64))
    found = formats.dequantise_mxfp4(blocks, scales)
    assert torch.equal(found, torch.from_numpy(meant))
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(found.transpose(1, 2), theirs)
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    scales = torch.tensor([0, 1, 60, 120, *range(121, 132), 254], dtype=torch.uint8).reshape(1, 1, 16)
    theirs = convert_moe_packed_tensors(every, scales, dtype=torch.float32)
    assert torch.equal(formats.dequantise_mxfp4(every, scales), theirs.transpose(1, 2))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_words_are_unpacked_from_their_lowest_bits(bits, dim):
    count = 32 // bits
    word = sum((place + 250) % 2**bits << bits * place for place in range(count))
    words = torch.from_numpy(np.array([[word, 0]], np.uint32).view(np.int32))
    words = words if dim == 1 else words.t().contiguous()
    found = formats.unpack(words, bits, dim)
    expected = [(place + 250) % 2**bits for place in range(count)] + [0] * count
    assert found.flatten().tolist() == expected
    assert found.shape[dim] == 2 * count


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("first_form", [True, False])
def test_gptq_zero_points_of_nought(bits, first_form):
    """Less one, they borrow from their neighbours, as the packer takes the one from whole words."""
    weight = noise(16, 32)
    weight[::3] = np.abs(weight[::3])
    tensors, meant = quantised.gptq(weight, 32, bits, symmetric=False, first_form=first_form)
    groups = tensors["g_idx"].long()
    packed = (tensors["qweight"], tensors["qzeros"], tensors["scales"], groups, bits)
    assert torch.equal(formats.gptq_numbers(*packed, first_form=first_form).dequantised(), torch.from_numpy(meant))
    assert not torch.equal(
        formats.gptq_numbers(*packed, first_form=not first_form).dequantised(), torch.from_numpy(meant)
    )


def test_awq_by_hand():
    """Outputs 0 to 7 of one input are 0 to 7, and a word holds them as 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits."""
    qweight = torch.from_numpy(np.array([[0x75316420]], np.uint32).view(np.int32))
    qzeros = torch.from_numpy(np.array([[0x11111111]], np.uint32).view(np.int32))
    found = formats.awq_numbers(qweight, qzeros, torch.full((1, 8), 0.5, dtype=torch.float16), torch.tensor([0]))
    found = found.dequantised()
    assert found.shape == (8, 1)
    assert found.flatten().tolist() == [0.5 * (number - 1) for number in range(8)]


def test_packed_by_hand():
    """Numbers are stored with 8 added."""
    packed = torch.from_numpy(np.array([[0x76543210], [0xFEDCBA98]], np.uint32).view(np.int32))
    groups, scales = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = formats.packed_numbers(packed, scales, groups, 4, None).dequantised()
    assert found.tolist() == [[-8.0, -7.0, -6.0, -10.0, -8.0], [0.0, 3.0, 6.0, 12.0, 16.0]]
    zeros = torch.tensor([[0x21, 0x43]], dtype=torch.int32)  # of row 0 in the lowest bits: 1 and 3, of row 1: 2 and 4
    found = formats.packed_numbers(packed, scales, groups, 4, zeros).dequantised()
    assert found.tolist() == [[-1.0, 0.0, 1.0, 0.0, 2.0], [18.0, 21.0, 24.0, 28.0, 32.0]]


def test_rounding_to_e4m3_is_as_written_in_numpy():
    weight = noise(100, 130)
    tensors, meant = quantised.fp8(weight, (64, 48))
    found = formats.e4m3_numbers(torch.from_numpy(weight), (64, 48))
    assert torch.equal(found.values.float(), tensors["weight"].float())
    assert torch.equal(found.dequantised(), torch.from_numpy(meant))
    one = formats.e4m3_numbers(torch.from_numpy(weight), (1, None))
    assert one.scales.shape == (100, 1)
    assert torch.equal(one.values.float().abs().amax(1), torch.full((100,), 448.0))
    nought = formats.e4m3_numbers(torch.zeros(4, 8), (None, None))
    assert not nought.dequantised().any()


def test_rounding_on_a_gpu_is_as_on_a_cpu(device):
    """To the bit: ranks and tools that round a weight have the same one."""
    weight = torch.from_numpy(noise(100, 130))
    for rounded in (
        lambda weight: formats.e4m3_numbers(weight, (64, 48)),
        lambda weight: formats.int4_numbers(weight, 32, symmetric=True),
        lambda weight: formats.int4_numbers(weight, 32, symmetric=False),
    ):
        for found, expected in zip(rounded(weight.to(device))[:3], rounded(weight)[:3], strict=True):
            if expected is not None:
                assert torch.equal(found.cpu().float(), expected.float())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [32, None])
def test_rounding_to_4_bits_is_off_by_half_a_step(size, symmetric):
    weight = torch.from_numpy(noise(24, 96))
    weight[3] = 0.0
    found = formats.int4_numbers(weight, size, symmetric=symmetric)
    assert found.values.dtype == torch.uint8
    assert int(found.values.max()) == 15
    steps = found.scales[:, found.groups]
    assert ((found.dequantised() - weight).abs() <= (0.5 + 0.5 * (not symmetric) + 1e-3) * steps).all()

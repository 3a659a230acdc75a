"""What surrounds the model in a decode step: gathering its inputs, drawing its tokens."""

from __future__ import annotations

import pytest
import torch

from rayllm_kernels import ops, reference
from rayllm_kernels.reference_noise import gumbel_noise


def draw_arguments(rows: int, vocab: int, dtype: torch.dtype, device: torch.device, randn) -> tuple:
    generator = torch.Generator().manual_seed(rows)
    seeds = torch.randint(0, 2**63 - 1, (rows,), generator=generator).to(device)
    positions = torch.randint(0, 4000, (rows,), generator=generator).to(device)
    temperature = torch.rand(rows, generator=generator).add_(0.2).to(device)
    noise_scale = torch.tensor([float(i % 3 != 0) for i in range(rows)], device=device)
    # A column slice: rows that are not contiguous.
    return 3 * randn(rows, vocab + 5, dtype=dtype)[:, :vocab], seeds, positions, temperature, noise_scale


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (1, 50), (7, 259), (3, 5000), (40, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_draws_equal_the_reference(kernels, randn, device, rows, vocab, dtype):
    arguments = draw_arguments(rows, vocab, dtype, device, randn)
    expected = reference.gumbel_argmax(*arguments)
    actual = kernels.gumbel_argmax(*arguments)
    assert actual.dtype == torch.int64
    if torch.equal(actual, expected):
        return
    # Float ties only: the drawn score is the reference's best up to rounding.
    logits, seeds, positions, temperature, noise_scale = arguments
    scores = logits.float() / temperature[:, None] + noise_scale[:, None] * gumbel_noise(seeds, positions, vocab)
    best = scores.gather(1, expected[:, None])
    assert torch.allclose(scores.gather(1, actual[:, None]), best, atol=1e-4)
    assert (actual != expected).sum() <= rows // 20


def test_the_noise_is_the_reference_noise(kernels, device):
    """Equal logits leave only the noise to decide, over many (seed, position) pairs."""
    rows, vocab = 300, 40
    seeds = torch.arange(rows, device=device) * (2**40 + 1)
    positions = torch.arange(rows, device=device) % 17
    ones = torch.ones(rows, device=device)
    logits = torch.zeros(rows, vocab, device=device)
    expected = gumbel_noise(seeds, positions, vocab).argmax(1)
    assert (kernels.gumbel_argmax(logits, seeds, positions, ones, ones) == expected).float().mean() > 0.995


def test_equal_scores_go_to_the_lowest_token_and_minus_infinity_is_never_drawn(kernels, device):
    logits = torch.full((2, 5000), float("-inf"), device=device)
    logits[0, [4000, 123, 999]] = 2.0
    logits[1, 4711] = -50.0
    seeds = positions = torch.zeros(2, dtype=torch.int64, device=device)
    ones = torch.ones(2, device=device)
    assert kernels.gumbel_argmax(logits, seeds, positions, ones, 0 * ones).tolist() == [123, 4711]
    assert kernels.gumbel_argmax(logits, seeds, positions, ones, ones)[1] == 4711


@pytest.mark.parametrize(
    ("vocab", "borders"), [(259, [65, 130, 195]), (5000, [1250, 2500, 3750]), (3000, [1024]), (4, [1])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_best_key_of_slices_is_the_draw_from_the_whole(kernels, randn, device, vocab, borders, dtype):
    logits, *rest = draw_arguments(9, vocab, dtype, device, randn)
    for module in (reference, kernels):
        whole = module.gumbel_argmax(logits, *rest)
        parts = [(0, borders[0]), *zip(borders, [*borders[1:], vocab], strict=True)]
        keys = torch.stack([module.gumbel_keys(logits[:, a:b], *rest, first_token=a) for a, b in parts])
        assert torch.equal(ops.tokens_of_keys(keys.amax(0)), whole)


def test_keys_of_equal_scores_prefer_the_lower_token(kernels, device):
    logits = torch.full((3, 40), -2.5, device=device)
    logits[1] = 7.0
    logits[2] = float("-inf")
    zeros, ones = torch.zeros(3, dtype=torch.int64, device=device), torch.ones(3, device=device)
    for module in (reference, kernels):
        low, high = (module.gumbel_keys(logits, zeros, zeros, ones, 0 * ones, first_token=t) for t in (2000, 5000))
        assert (low > high)[:2].all()
        assert ops.tokens_of_keys(low).tolist()[:2] == [2000, 2000]
        assert low[1] > low[0] > low[2]


@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("max_blocks", [3, 40, 1100])
def test_decode_inputs_are_gathered_and_padding_is_inert(kernels, device, block_size, max_blocks):
    generator = torch.Generator().manual_seed(0)
    table_rows, count, max_len = 9, 6, max_blocks * block_size
    token_table = torch.randint(0, 1000, (table_rows, max_len), dtype=torch.int32, generator=generator).to(device)
    block_table = torch.randint(0, 500, (table_rows, max_blocks), dtype=torch.int32, generator=generator).to(device)
    rows = torch.tensor([4, 0, 8, 2, 0, 0], device=device)
    positions = torch.tensor([0, max_len - 1, max_len // 2, block_size - 1, -1, -1], device=device)

    def run(module) -> dict[str, torch.Tensor]:
        outputs = {
            "input_ids": torch.full((count,), -9, dtype=torch.int64, device=device),
            "slots": torch.full((count,), -9, dtype=torch.int64, device=device),
            "seq_lens": torch.full((count,), -9, dtype=torch.int32, device=device),
            "block_tables": torch.full((count, max_blocks), -9, dtype=torch.int32, device=device),
        }
        module.decode_inputs(rows, positions, token_table, block_table, block_size, **outputs)
        return outputs

    expected, actual = run(reference), run(kernels)
    assert expected["seq_lens"].tolist() == [1, max_len, max_len // 2 + 1, block_size, 0, 0]
    assert expected["slots"][4:].tolist() == [-1, -1]
    assert (expected["block_tables"][4:] == -9).all()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_bad_arguments_are_named(kernels, device, randn):
    arguments = list(draw_arguments(3, 10, torch.float32, device, randn))
    for index, name in enumerate(["logits", "seeds", "positions", "temperature", "noise_scale"]):
        bad = list(arguments)
        bad[index] = bad[index].to(torch.int16)
        for module in (reference, kernels):
            with pytest.raises(ValueError, match=f"^{name} "):
                module.gumbel_argmax(*bad)

"""The counter-based noise: its hash bit for bit, its distribution, and that nothing that matters is ignored."""

import math

import pytest
import torch

from rayllm_kernels.sampling.noise import gumbel_noise, gumbel_of_bits, philox, random_bits

WORD = 0xFFFFFFFF
EDGE_SEEDS = [0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**62, 2**63 - 1]


def expected_words(seed, position, block, rounds=7):
    """Philox4x32 in Python's unbounded integers."""
    counter, key = [block, position, 0, 0], [seed & WORD, seed >> 32]
    for _ in range(rounds):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [second >> 32 ^ counter[1] ^ key[0], second & WORD, first >> 32 ^ counter[3] ^ key[1], first & WORD]
        key = [(key[0] + 0x9E3779B9) & WORD, (key[1] + 0xBB67AE85) & WORD]
    return counter


def expected_bits(seed, position, vocab_id):
    """The formula of the module's docstring."""
    return expected_words(seed, position, vocab_id // 1024 * 256 + vocab_id % 256)[vocab_id // 256 % 4]


def bits_of(seeds, positions, vocab_size, start=0):
    seeds, positions = torch.broadcast_tensors(torch.as_tensor(seeds), torch.as_tensor(positions))
    return random_bits(seeds.contiguous(), positions.contiguous(), vocab_size, start)


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def test_philox_yields_its_published_answer():
    """The known answer of 7 rounds for a zero key and counter."""
    zero = torch.zeros(1, dtype=torch.int64)
    words = [word.item() for word in philox(zero, zero, zero[None])]
    assert words == expected_words(0, 0, 0) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("start", [0, 255, 150_000, 150_524, 151_039])
@pytest.mark.parametrize("count", [1, 5, 300])
def test_bits_follow_the_documented_formula(start, count):
    """Starts in the middle, at the end and before the end of a run and of a span."""
    seeds = [s for s in EDGE_SEEDS for _ in range(4)]
    positions = [0, 1, 777, 2**31 - 1] * len(EDGE_SEEDS)
    bits = bits_of(seeds, positions, count, start)
    for i, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert bits[i].tolist() == [expected_bits(seed, position, v) for v in range(start, start + count)]


def test_a_known_value_never_changes():
    """Seeds are a promise to users: this fails if an edit changes what a seed means."""
    assert bits_of([2**40 + 5], [7], 4).tolist() == [[3345715629, 1071826066, 3753025206, 1722486156]]


def test_shards_are_slices_of_the_whole():
    seeds, positions = torch.tensor(EDGE_SEEDS), torch.arange(len(EDGE_SEEDS))
    whole = gumbel_noise(seeds, positions, 1000)
    for start, stop in ((0, 250), (250, 251), (251, 777), (777, 1000)):
        shard = gumbel_noise(seeds, positions, stop - start, vocab_start=start)
        assert torch.equal(shard, whole[:, start:stop])


def test_a_row_does_not_depend_on_the_others():
    seeds, positions = torch.tensor(EDGE_SEEDS), torch.arange(len(EDGE_SEEDS), dtype=torch.int32)
    whole = gumbel_noise(seeds, positions, 333)
    order = torch.randperm(len(EDGE_SEEDS), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_noise(seeds[order], positions[order], 333), whole[order])
    assert torch.equal(gumbel_noise(seeds[::3], positions[::3], 333), whole[::3])
    assert torch.equal(gumbel_noise(seeds[4:5], positions[4:5].long(), 333), whole[4:5])


def test_gumbel_values_are_finite_precise_and_reach_far():
    bits = torch.tensor([0, 1, 2, 1000, 2**21, 2**31, 2**32 - 2**9, 2**32 - 1])
    noise = gumbel_of_bits(bits)
    assert torch.isfinite(noise).all()
    assert (noise.diff() <= 0).all()
    assert noise[0] > 22.8  # large noise is rare, not cut off: a token of probability 1e-9 can win
    assert noise[-1] < -2.8
    for b, g in zip(bits.tolist()[:-2], noise.tolist()[:-2], strict=True):
        assert g == pytest.approx(-math.log(-math.log1p(-(b + 0.5) / 2**32)), abs=3e-6)


def test_noise_has_the_gumbel_distribution():
    noise = gumbel_noise(torch.arange(64), torch.arange(64) * 17, 4096).double().flatten()
    uniform = torch.exp(-torch.exp(-noise))  # the distribution function: uniform on [0, 1]
    counts = torch.histc(uniform, bins=100, min=0, max=1)
    assert chi_square(counts, noise.numel() / 100) < 161  # 99 degrees of freedom, one in 10 000
    assert noise.mean().item() == pytest.approx(0.57722, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.03)


@pytest.mark.parametrize("kind", ["seeds", "high seeds", "positions"])
def test_argmax_draws_from_the_softmax(kind):
    logits = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.0, -3.0, 0.25, -0.5])
    count = 40_000
    counter = torch.arange(count)
    seeds, positions = {
        "seeds": (counter, torch.full_like(counter, 5)),
        "high seeds": (counter << 40, torch.full_like(counter, 5)),
        "positions": (torch.full_like(counter, 1234), counter),
    }[kind]
    drawn = (logits + gumbel_noise(seeds, positions, 8)).argmax(dim=1)
    counts = torch.bincount(drawn, minlength=8)
    assert chi_square(counts, logits.double().softmax(0) * count) < 29.9  # 7 degrees of freedom, one in 10 000


NEIGHBOURS = {
    "next position": ((100, 7), (100, 8)),
    "next seed": ((100, 7), (101, 7)),
    "seed with another high half": ((100, 7), (100 + (1 << 32), 7)),
    "seed with another top bit": ((100, 7), (100 + (1 << 62), 7)),
    "halves of the seed swapped": (((5 << 32) + 9, 7), ((9 << 32) + 5, 7)),
    "seed and position swapped": ((3, 4), (4, 3)),
    "sum of seed and position": ((50, 51), (51, 50)),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbouring_rows_are_independent(name):
    (seed_a, position_a), (seed_b, position_b) = NEIGHBOURS[name]
    a, b = (bits_of([s], [p], 200_000)[0] for s, p in ((seed_a, position_a), (seed_b, position_b)))
    joint = torch.bincount((a >> 29) * 8 + (b >> 29), minlength=64)
    assert chi_square(joint, 200_000 / 64) < 113  # 63 degrees of freedom, one in 10 000
    # Nor a permutation of each other's columns: two sets of n out of 2^32 meet about n^2 / 2^32 = 9.3 times.
    common = torch.isin(a, b).sum().item()
    assert common < 29


def test_draws_of_neighbours_are_independent():
    """Jointly, what is drawn at (seed, position) and at its neighbours: the use that matters."""
    counter = torch.arange(30_000)
    here = gumbel_noise(counter, torch.full_like(counter, 3), 4).argmax(1)
    for seeds, positions in (
        (counter, torch.full_like(counter, 4)),
        (counter + 1, torch.full_like(counter, 3)),
        (counter + (1 << 32), torch.full_like(counter, 3)),
        (counter + 1, torch.full_like(counter, 2)),
    ):
        there = gumbel_noise(seeds, positions, 4).argmax(1)
        joint = torch.bincount(here * 4 + there, minlength=16)
        assert chi_square(joint, 30_000 / 16) < 44.3  # 15 degrees of freedom, one in 10 000


def test_tokens_that_share_an_evaluation_are_independent():
    """Words of one block, and neighbours in one word."""
    bits = bits_of([12345], [6], 400 * 1024)[0].view(400, 4, 256)
    top = bits >> 29
    for first, second in ((0, 1), (0, 2), (1, 3), (2, 3)):
        joint = torch.bincount((top[:, first] * 8 + top[:, second]).flatten(), minlength=64)
        assert chi_square(joint, 400 * 256 / 64) < 113  # 63 degrees of freedom, one in 10 000
    neighbours = torch.bincount((top[:, :, 0::2] * 8 + top[:, :, 1::2]).flatten(), minlength=64)
    assert chi_square(neighbours, 400 * 512 / 64) < 113


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
def test_every_byte_is_uniform(shift):
    """High bytes decide what wins, low ones between close scores."""
    bits = bits_of(list(range(40)), [3] * 40, 10_000)
    counts = torch.bincount(((bits >> shift) & 255).flatten(), minlength=256)
    assert chi_square(counts, bits.numel() / 256) < 347  # 255 degrees of freedom, one in 10 000


def test_every_input_bit_changes_half_of_the_output_bits():
    """Of 100 tokens a row, which cost no more than one."""
    generator = torch.Generator().manual_seed(1)
    seeds = torch.randint(0, 2**62, (40,), generator=generator)
    positions = torch.randint(0, 2**17, (40,), generator=generator)
    base = random_bits(seeds, positions, 100)
    changes = [(random_bits(seeds ^ (1 << bit), positions, 100), f"seed bit {bit}") for bit in range(63)]
    changes += [(random_bits(seeds, positions ^ (1 << bit), 100), f"position bit {bit}") for bit in range(18)]
    changes += [(random_bits(seeds, positions, 100, 1 << bit), f"vocab bit {bit}") for bit in range(18)]
    for changed, name in changes:
        flips = ((base ^ changed)[..., None] >> torch.arange(32)) & 1
        rates = flips.double().mean(dim=(0, 1))
        assert (rates - 0.5).abs().max() < 0.045, name  # 5.7 standard deviations


def test_no_row_repeats():
    counter = torch.arange(5_000)
    seeds = torch.cat([counter, counter << 32, counter << 43, counter + 2**62, torch.full_like(counter, 77)])
    positions = torch.cat([torch.full_like(counter, 9)] * 4 + [counter + 10])
    rows = random_bits(seeds, positions, 2)
    pairs = ((rows[:, 0] >> 1) << 32) + rows[:, 1]
    distinct_inputs = torch.stack((seeds, positions), 1).unique(dim=0).shape[0]
    assert pairs.unique().numel() == distinct_inputs

"""Counter-based Gumbel noise: a pure function of (seed, position, vocab index), so no generator state exists.

The same sequence gets the same noise at the same position in whatever batch, after a preemption or a restart, and a
vocabulary shard computes just its own columns. argmax(logits + noise) is then a draw from softmax(logits): the
Gumbel-max trick (Gumbel 1954; Maddison, Tarlow and Minka 2014, "A* sampling").

The integer part, exact on every device: Philox4x32 with 7 rounds (Salmon, Moraes, Dror and Shaw 2011, "Parallel random
numbers: as easy as 1, 2, 3", where 7 rounds are the fewest that pass every test of BigCrush). One evaluation gives four
32-bit words, shared by four tokens:

    key     = (seed & 0xffffffff, seed >> 32)
    counter = (block, position, 0, 0)      block = v // 1024 * 256 + v % 256
    bits[v] = word v // 256 % 4 of philox(key, counter)

Philox is a bijection of the counter under each key, so two (position, block) of a seed never have the same four words.
Tokens that share an evaluation lie 256 apart, so that a GPU reads 256 neighbours at a time for each of the four words.

The float part: E = -log(1 - u) with u = (bits + 1/2) / 2^32 is exponential, -log(E) is Gumbel. Large noise, which is
what lets an unlikely token win, comes from small u; there float32 is fine-grained, so tokens down to a probability of
about 1e-9 are drawn as often as they should be. (-log(-log(u)) has its large values at u near 1, where float32 steps by
6e-8: the flat tail of a large vocabulary would hardly be drawn.)
"""

from __future__ import annotations

import torch

ROUNDS = 7
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
RUN = 256  # neighbouring tokens of one word
SPAN = 4 * RUN  # tokens of RUN evaluations
_WORD = 0xFFFFFFFF
# 2^-32 * (1 - 2^-24): bits near 2^32 round up to it in float32, and u must stay below 1.
UNIFORM_STEP = ((1 << 24) - 1) * 2.0**-56


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, vocab_start: int = 0) -> torch.Tensor:
    """Standard Gumbel noise for one row a (seed, position).

    seeds: [N] int64, 0 <= seed < 2^63. positions: [N] any integer type, 0 <= position < 2^31: index that the drawn
    token will have in its sequence. vocab_size: V, columns wanted; they are the vocab ids from vocab_start on.
    Returns [N, V] float32, every value finite, from -2.82 to 22.9.
    """
    return gumbel_of_bits(random_bits(seeds, positions, vocab_size, vocab_start))


def gumbel_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """The float part: integers in [0, 2^32) to float32 Gumbel values of the same shape; small bits, large noise."""
    uniform = bits.to(torch.float32).add_(0.5).mul_(UNIFORM_STEP)
    exponential = uniform.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def random_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, vocab_start: int = 0) -> torch.Tensor:
    """The integers beneath `gumbel_noise`, same arguments. Returns [N, V] int64 in [0, 2^32), uniform."""
    first, offset = divmod(vocab_start, SPAN)
    last = -(-(vocab_start + vocab_size) // SPAN)
    blocks = torch.arange(first * RUN, last * RUN, dtype=torch.int64, device=seeds.device)
    words = [each.unflatten(1, (last - first, RUN)) for each in philox(seeds, positions, blocks[None, :])]
    return torch.stack(words, dim=2).flatten(1)[:, offset : offset + vocab_size]


def philox(seeds: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor) -> list[torch.Tensor]:
    """Four words a (row, block), each [N, K] int64 in [0, 2^32). seeds, positions: [N]. blocks: [N or 1, K] int64."""
    key_0, key_1 = (seeds & _WORD)[:, None], (seeds >> 32)[:, None]
    zero = torch.zeros_like(key_0)
    c0, c1, c2, c3 = blocks, positions.to(torch.int64)[:, None], zero, zero
    for _ in range(ROUNDS):
        # int64 products wrap, to the same 64 bits as unsigned ones; torch's shifts are arithmetic, hence the masks.
        product_0, product_1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((product_1 >> 32) ^ (c1 ^ key_0)).bitwise_and_(_WORD)
        c2 = ((product_0 >> 32) ^ (c3 ^ key_1)).bitwise_and_(_WORD)
        c1, c3 = product_1.bitwise_and_(_WORD), product_0.bitwise_and_(_WORD)
        key_0, key_1 = (key_0 + KEY_STEPS[0]) & _WORD, (key_1 + KEY_STEPS[1]) & _WORD
    return [c0, c1, c2, c3]

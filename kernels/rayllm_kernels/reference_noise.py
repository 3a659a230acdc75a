"""Counter-based Gumbel noise: a pure function of (seed, position, vocab index), so no generator state exists.

The same sequence gets the same noise at the same position in whatever batch, after a preemption or a restart, and a
vocabulary shard computes just its own columns. argmax(logits + noise) is then a draw from softmax(logits): the
Gumbel-max trick (Gumbel 1954; Maddison, Tarlow and Minka 2014, "A* sampling").

The integer part, exact on every device (all arithmetic modulo 2^32, u = unsigned 32-bit words):

    mix(x):   x ^= x >> 16;  x *= 0x7feb352d;  x ^= x >> 15;  x *= 0x846ca68b;  x ^= x >> 16
    words    = (seed & 0xffffffff, seed >> 32);  place = (mix(position ^ C0), mix(position ^ C1))
    key[i]   = mix(mix(mix(words[i] ^ C2) + words[1 - i]) + place[i])        i = 0, 1
    bits[v]  = mix(mix(v ^ key[0]) + key[1]) & 0x7fffffff

mix is Chris Wellons' lowbias32 ("Prospecting for hash functions", 2018; public domain): a bijection whose every input
bit flips every output bit with probability close to 1/2. Both keys are bijections of the position under one seed and
bits (before the mask) one of v, so a sequence meets no key twice and a row no value three times.

The float part: E = -log(1 - u) with u = (bits + 1/2) / 2^31 is exponential, -log(E) is Gumbel. Large noise, which is
what lets an unlikely token win, comes from small u; there float32 is fine-grained, so tokens down to a probability of
about 1e-9 are drawn as often as they should be. (-log(-log(u)) has its large values at u near 1, where float32 steps by
6e-8: the flat tail of a large vocabulary would hardly be drawn.)
"""

from __future__ import annotations

import torch

_C0, _C1, _C2 = 0x3C6EF372, 0x1B873593, 0x2545F491  # arbitrary distinct words; they only have to differ
_MULTIPLIER_1 = 0x7FEB352D
_MULTIPLIER_2 = 0x846CA68B - (1 << 32)  # as a signed word: int32 products wrap to the same bits
_BITS_MASK = 0x7FFFFFFF
# 2^-31 * (1 - 2^-24): bits near 2^31 round up to it in float32, and u must stay below 1.
_UNIFORM_STEP = ((1 << 24) - 1) * 2.0**-55


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, vocab_start: int = 0) -> torch.Tensor:
    """Standard Gumbel noise for one row a (seed, position).

    seeds: [N] int64, 0 <= seed < 2^63. positions: [N] any integer type, 0 <= position < 2^31: index that the drawn
    token will have in its sequence. vocab_size: V, columns wanted; they are the vocab ids from vocab_start on.
    Returns [N, V] float32, every value finite, from -2.82 to 22.2.
    """
    return gumbel_of_bits(random_bits(seeds, positions, vocab_size, vocab_start))


def gumbel_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """The float part: integers in [0, 2^31) to float32 Gumbel values of the same shape; small bits, large noise."""
    uniform = bits.to(torch.float32).add_(0.5).mul_(_UNIFORM_STEP)
    exponential = uniform.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def random_bits(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, vocab_start: int = 0) -> torch.Tensor:
    """The hash beneath `gumbel_noise`, same arguments. Returns [N, V] int32 in [0, 2^31), uniform."""
    keys = _row_keys(seeds, positions)
    vocab = torch.arange(vocab_start, vocab_start + vocab_size, dtype=torch.int32, device=seeds.device)
    state = _mix(vocab[None, :] ^ keys[:, :1])
    state += keys[:, 1:]
    return _mix(state).bitwise_and_(_BITS_MASK)


def _row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Two 32-bit words a row out of (seed, position): [N, 2] int32."""
    words = seeds.contiguous().view(torch.int32).view(-1, 2)  # low half, high half (little-endian hosts and GPUs)
    place = positions.to(torch.int32)
    places = _mix(torch.stack((place ^ _C0, place ^ _C1), dim=1))
    halves = _mix(words ^ _C2)
    halves += words.flip(1)
    keys = _mix(halves)
    keys += places
    return _mix(keys)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """lowbias32 of int32 words, in place. torch shifts are arithmetic: the mask makes them logical."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _MULTIPLIER_1
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _MULTIPLIER_2
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x

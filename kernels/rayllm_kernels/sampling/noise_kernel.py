"""The noise of `noise.py` as Triton device functions, and a scan for the best noisy score of a range of tokens.

Computing the noise is what limits a draw: with one hash and two logarithms a token, reading the logits takes a fifth of
the time. But the noise of a token matters only if it can win, and with a best score so far that is a question about one
integer. The noise is -log(E) with E >= u, so

    score > best   needs   u < exp(logit / temperature - best)

which takes an exponential and a comparison, with a margin for rounding. Tiles in which no token passes are left; few
do pass, about 1/n of the n-th tile. The result is exactly the argmax of all scores.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from . import draw, noise

M0, M1 = (tl.constexpr(factor) for factor in noise.MULTIPLIERS)
STEP0, STEP1 = (tl.constexpr(step) for step in noise.KEY_STEPS)
ROUNDS = tl.constexpr(noise.ROUNDS)
RUN = tl.constexpr(noise.RUN)
SPAN = tl.constexpr(noise.SPAN)
UNIFORM_STEP = tl.constexpr(noise.UNIFORM_STEP)
SERIES_BOUND = tl.constexpr(1.0 / 16)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_TOKEN = tl.constexpr(draw.NO_TOKEN)


@triton.jit
def philox(block, position, seed):
    """Four uint32 words for each of a tensor of blocks. position, seed: scalars."""
    key_0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    key_1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = block.to(tl.uint32)
    c1 = position.to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(ROUNDS):
        product_0 = c0.to(tl.uint64) * M0
        product_1 = c2.to(tl.uint64) * M1
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ key_0
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ key_1
        c1 = product_1.to(tl.uint32)
        c3 = product_0.to(tl.uint32)
        key_0 += STEP0
        key_1 += STEP1
    return c0, c1, c2, c3


@triton.jit
def gumbel(bits):
    """Standard Gumbel noise of uint32 words, float32."""
    u = (bits.to(tl.float32) + 0.5) * UNIFORM_STEP
    # -log(1 - u): a series where 1 - u would round the small u that matter most away.
    series = u * (1.0 + u * (1.0 / 2 + u * (1.0 / 3 + u * (1.0 / 4 + u * (1.0 / 5)))))
    exponential = tl.where(u < SERIES_BOUND, series, tl.log2(1.0 - u) * -LN2)
    return tl.log2(exponential) * -LN2


@triton.jit
def gumbel_of_tokens(token, position, seed):
    """Noise of any tokens, float32: an evaluation of Philox for each."""
    w0, w1, w2, w3 = philox(token // SPAN * RUN + token % RUN, position, seed)
    word = token // RUN % 4
    return gumbel(tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3)))


@triton.jit
def _load_logits(source, token, SHARDED: tl.constexpr):
    """-inf outside of first to vocab_size - 1; unless SHARDED, first is 0."""
    row_ptr, first, vocab_size = source
    if SHARDED:
        return tl.load(row_ptr + token, mask=(token >= first) & (token < vocab_size), other=float("-inf"))
    else:
        return tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf"))


@triton.jit
def _load_span(source, token, SHARDED: tl.constexpr):
    """The logits of the four words' tokens; token: those of the first."""
    x0 = _load_logits(source, token, SHARDED)
    x1 = _load_logits(source, token + RUN, SHARDED)
    x2 = _load_logits(source, token + 2 * RUN, SHARDED)
    x3 = _load_logits(source, token + 3 * RUN, SHARDED)
    return x0, x1, x2, x3


@triton.jit
def _scaled(logit, inverse, bounds):
    logit = logit.to(tl.float32)
    if bounds is not None:
        low, above = bounds
        logit = tl.where((logit >= low) & (logit > above), logit, float("-inf"))
    return logit * inverse


@triton.jit
def _may_win(scaled, bits, best):
    """True wherever the score can exceed best; true for few others."""
    u_plus_1 = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True)  # u rounded down to 23 bits
    # 1% and 2^-21 are far more than what float32 rounds off, here or in the score.
    return u_plus_1 < tl.exp2((scaled - best) * LOG2E) * 1.01 + (1.0 + 2.0**-21)


@triton.jit
def _improve(best, best_token, scaled, bits, token, noise_scale):
    """The better of the best so far and the scores of one word's tokens; the lower token among equals.

    Words are asked one by one again: each costs the noise of all its tokens, and mostly just one has a token that may
    win.
    """
    if tl.max(_may_win(scaled, bits, best).to(tl.int32), 0) != 0:
        score = scaled + noise_scale * gumbel(bits)
        top = tl.max(score, 0)
        first = tl.min(tl.where(score == top, token, NO_TOKEN), 0)
        if (top > best) | ((top == best) & (first < best_token)):
            best = top
            best_token = first
    return best, best_token


@triton.jit
def scan(source, begin, end, inverse, noise_scale, position, seed, bounds, RUNS: tl.constexpr, SHARDED: tl.constexpr):
    """(best score, lowest token that has it) of tokens begin to end - 1, both multiples of RUNS * SPAN but for the
    vocabulary's end. (-inf, begin) if there are none.

    source: (where the logit of token 0 is or would be, first token, end of the vocabulary): if SHARDED, there are
    logits of tokens from the first one on only. bounds: None, or (low, above): of the tokens whose logit is >= low and
    > above. A tile is RUNS spans: four tensors of RUNS * RUN tokens, one for each word of Philox.
    """
    lane = tl.arange(0, RUNS * RUN)
    offset = lane // RUN * SPAN + lane % RUN
    best = tl.full([], float("-inf"), tl.float32)
    best_token = begin
    x0, x1, x2, x3 = _load_span(source, begin + offset, SHARDED)
    for start in range(begin, end, RUNS * SPAN):
        token = start + offset
        s0 = _scaled(x0, inverse, bounds)
        s1 = _scaled(x1, inverse, bounds)
        s2 = _scaled(x2, inverse, bounds)
        s3 = _scaled(x3, inverse, bounds)
        # The next tile is on its way while this one's noise is computed.
        x0, x1, x2, x3 = _load_span(source, token + RUNS * SPAN, SHARDED)
        w0, w1, w2, w3 = philox(lane + start // SPAN * RUN, position, seed)
        likely = (_may_win(s0, w0, best) | _may_win(s1, w1, best)) | (_may_win(s2, w2, best) | _may_win(s3, w3, best))
        if tl.max(likely.to(tl.int32), 0) != 0:
            best, best_token = _improve(best, best_token, s0, w0, token, noise_scale)
            best, best_token = _improve(best, best_token, s1, w1, token + RUN, noise_scale)
            best, best_token = _improve(best, best_token, s2, w2, token + 2 * RUN, noise_scale)
            best, best_token = _improve(best, best_token, s3, w3, token + 3 * RUN, noise_scale)
    return best, best_token


@triton.jit
def scan_without_noise(source, begin, end, inverse, TILE: tl.constexpr, SHARDED: tl.constexpr):
    """As `scan` with no noise and no restriction: the best logit / temperature."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_token = tl.zeros([TILE], tl.int32) + begin
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        scaled = _load_logits(source, token, SHARDED).to(tl.float32) * inverse
        better = scaled > best
        best = tl.where(better, scaled, best)
        best_token = tl.where(better, token, best_token)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, best_token, NO_TOKEN), 0)

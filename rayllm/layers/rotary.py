"""Rotary position embedding (Su et al., 2021) from a table of cosines and sines."""

from __future__ import annotations

import math

import torch

from rayllm.config.rope import RopeSpec


def cos_sin_table(rope: RopeSpec, max_position: int) -> torch.Tensor:
    """[max_position, rotary_dim] float32 on the CPU, a row for each position below max_position: cosines in the first
    half of a row, sines in the second. max_position: the tokens of a sequence at most.

    Computed on the CPU whatever the model's device, so that all devices rotate by the same angles.
    """
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse_frequencies(rope, max_position)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(rope.attention_factor)


def query_scales(rope: RopeSpec, max_position: int) -> torch.Tensor | None:
    """[max_position] float32 on the CPU: by what the queries of each position are multiplied; None for nothing.

    They grow with the logarithm of how often a position is past the pretraining's context (Llama 4).
    """
    if not rope.query_beta:
        return None
    times = torch.floor(torch.arange(max_position) / rope.original_max_position)
    return 1 + rope.query_beta * torch.log(1 + times)


def inverse_frequencies(rope: RopeSpec, max_model_len: int) -> torch.Tensor:
    """[rotary_dim / 2] float32, radians a position; each operation in the order and precision of transformers.

    max_model_len: the tokens of a sequence at most, by which types choose that depend on a length ("dynamic" and
    "longrope"; docs/decisions/rope.md says why).
    """
    turning = 2 * rope.turning_pairs if rope.rope_type == "proportional" else rope.rotary_dim
    exponents = torch.arange(0, turning, 2, dtype=torch.float32) / rope.rotary_dim
    if rope.rope_type == "dynamic":
        return 1.0 / _dynamic_theta(rope, max_model_len) ** exponents
    periods = rope.theta**exponents
    if rope.rope_type == "longrope":
        factors = rope.long_factors if max_model_len > rope.original_max_position else rope.short_factors
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * periods)
    if rope.rope_type == "linear":
        return (1.0 / periods) / rope.factor
    if rope.rope_type == "llama3":
        return _llama3_frequencies(rope, 1.0 / periods)
    if rope.rope_type == "yarn":
        return _yarn_frequencies(rope, periods)
    if rope.rope_type == "proportional":  # pairs lie as far apart as if all turned
        still = torch.zeros((rope.rotary_dim - turning) // 2)
        return torch.cat([1.0 / periods, still]) / rope.factor
    return 1.0 / periods


def _dynamic_theta(rope: RopeSpec, max_model_len: int) -> float:
    """NTK-aware scaling: a larger base where sequences may be longer than the pretraining's."""
    length, dim = max(max_model_len, rope.original_max_position), rope.rotary_dim
    stretch = rope.factor * length / rope.original_max_position - (rope.factor - 1)
    return rope.theta * stretch ** (dim / (dim - 2))


def _llama3_frequencies(rope: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones kept, those between blended (Llama 3.1)."""
    context = rope.original_max_position
    wavelengths = 2 * math.pi / plain
    blend = (context / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    stretched = torch.where(wavelengths > context / rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(wavelengths < context / rope.high_freq_factor, plain, stretched)


def _yarn_frequencies(rope: RopeSpec, periods: torch.Tensor) -> torch.Tensor:
    """Dimensions that turn more than beta_fast times in the original context keep their frequency, those that turn less
    than beta_slow times are stretched by the factor, with a linear ramp between (YaRN, Peng et al., 2023)."""

    def dimension_of(rotations: float) -> float:
        ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept

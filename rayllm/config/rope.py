"""`RopeSpec`: the rotary position embedding of a model, as config.json describes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rayllm.config.json_fields import JsonFields
from rayllm.config.known_keys import refuse_unknown
from rayllm.errors import ModelError


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. rope_type: "default", "linear", "llama3" or "yarn".

    rotary_dim: leading entries of a head that are rotated. attention_factor: multiplies cos and sin (yarn).
    low_freq_factor, high_freq_factor: llama3. beta_fast, beta_slow, truncate: yarn.
    original_max_position: context of the pretraining, in tokens (llama3 and yarn).
    """

    rope_type: str
    theta: float
    rotary_dim: int
    original_max_position: int
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def max_model_len(self, max_position_embeddings: int) -> int:
        """Tokens that the embedding reaches. llama3's max_position_embeddings is already the stretched one."""
        if self.rope_type == "linear":
            return int(max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            return int(self.original_max_position * self.factor)
        return max_position_embeddings


def parse_rope(config: JsonFields, head_dim: int, max_position: int, *, theta: float = 10000.0) -> RopeSpec:
    """The rotary embedding in config.json. Raises ModelError, also for other types than `RopeSpec` has.

    theta: the default of rope_theta.
    """
    # transformers 5 still reads rope_scaling, and prefers it.
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    name, raw = ("rope_scaling", old) if old else ("rope_parameters", new or {})
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        raise ModelError(f"{config.file}: {name} must be one object for all layers, not {raw!r}")
    rope = JsonFields(raw, config.file, name + ".")
    kind = rope.one_of(f"{name}.rope_type", rope.text("rope_type", rope.text("type", "default")), tuple(_OWN_FIELDS))
    theta = rope.number("rope_theta", config.number("rope_theta", theta))
    partial = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if partial != 1:  # of these architectures transformers turns whole heads by the default type and fails by others
        raise ModelError(f"{config.file}: partial_rotary_factor {partial} is not supported; supported is 1")
    if head_dim % 2:
        raise ModelError(f"{config.file}: head_dim {head_dim} is odd, which rotary positions do not support")
    original = rope.size("original_max_position_embeddings", max_position)
    original = config.size("original_max_position_embeddings", original)
    own = _OWN_FIELDS[kind](rope, max_position / original)
    refuse_unknown(rope)
    return RopeSpec(kind, theta, head_dim, original, **own)


def _linear(rope: JsonFields, _stretch: float) -> dict[str, Any]:
    return {"factor": rope.number("factor")}


def _llama3(rope: JsonFields, _stretch: float) -> dict[str, Any]:
    fields = {name: rope.number(name) for name in ("low_freq_factor", "high_freq_factor", "factor")}
    if fields["low_freq_factor"] == fields["high_freq_factor"]:
        raise ModelError(f"{rope.file}: {rope.prefix}low_freq_factor must differ from high_freq_factor")
    return fields


def _yarn(rope: JsonFields, stretch: float) -> dict[str, Any]:
    """YaRN (Peng et al., 2023), with the attention factor resolved as transformers does."""
    # A null factor (not an absent one) asks for the ratio of the two contexts.
    factor = rope.number("factor", stretch if rope.is_null("factor") else None)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = temperature(1.0)
    if all([rope.get("mscale"), rope.get("mscale_all_dim")]):
        attention = temperature(rope.number("mscale")) / temperature(rope.number("mscale_all_dim"))
    return {
        "factor": factor,
        "attention_factor": rope.number("attention_factor", attention),
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "truncate": rope.flag("truncate", True),
    }


# Rope type -> the fields of RopeSpec that only it has. stretch: the model's context over that of its pretraining.
_OWN_FIELDS: dict[str, Callable[[JsonFields, float], dict[str, Any]]] = {
    "default": lambda _rope, _stretch: {},
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}

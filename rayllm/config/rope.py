"""`RopeSpec`: the rotary position embedding of a model, as config.json describes it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rayllm.config.json_fields import JsonFields
from rayllm.config.known_keys import refuse_unknown
from rayllm.errors import ModelError


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. rope_type: "default", "linear", "dynamic", "llama3", "yarn", "longrope" or
    "proportional".

    rotary_dim: leading entries of a head that are rotated. interleaved: in pairs of neighbours, not of halves.
    query_beta: of the growth of queries with their position, see `layers.rotary.query_scales`; 0 for none.
    attention_factor: multiplies cos and sin (yarn, longrope). score_factor: what latent attention multiplies the
    products of queries and keys by (yarn); other attention does not.
    low_freq_factor, high_freq_factor: llama3. beta_fast, beta_slow, truncate: yarn. short_factors, long_factors: of the
    rotary_dim / 2 periods, longrope.
    turning_pairs: those that turn, the first ones of a head; the others stay as they are (proportional).
    stretched: max_position_embeddings is what the factor of "linear" leads to, not what it starts from (Gemma 3).
    original_max_position: context of the pretraining, in tokens (all types but default and linear).
    """

    rope_type: str
    theta: float
    rotary_dim: int
    original_max_position: int
    interleaved: bool = False
    query_beta: float = 0.0
    factor: float = 1.0
    attention_factor: float = 1.0
    score_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    turning_pairs: int = 0
    stretched: bool = False

    def max_model_len(self, max_position_embeddings: int) -> int:
        """Tokens that the embedding reaches.

        max_position_embeddings is already the stretched one for llama3 and longrope.
        """
        if self.rope_type in ("linear", "dynamic") and not self.stretched:
            return int(min(max_position_embeddings * self.factor, sys.maxsize))
        if self.rope_type == "yarn":
            return int(min(self.original_max_position * self.factor, sys.maxsize))
        return max_position_embeddings

    @property
    def exact_len(self) -> int | None:
        """Tokens up to which the frequencies are those of the pretraining, where they depend on a sequence's length.

        None where they do not.
        """
        return self.original_max_position if self.rope_type in ("dynamic", "longrope") else None


def parse_rope(
    config: JsonFields,
    head_dim: int,
    max_position: int,
    *,
    theta: float = 10000.0,
    partial: float | None = None,
    original: int | None = None,
    kinds: Mapping[str, str] | None = None,
    interleaved: bool = False,
    scales_queries: bool = False,
    has_sections: bool = False,
    absent: dict[str, Any] | None = None,
) -> RopeSpec:
    """The rotary embedding in config.json. Raises ModelError, also for other types than `RopeSpec` has.

    The rest is what transformers' class of the architecture has beside it.
    theta: the default of rope_theta. partial: that of partial_rotary_factor, the share of a head that is rotated; None
    if transformers turns whole heads by the default type and fails by others, so that there is no answer to be equal
    to. original: that of original_max_position_embeddings. kinds: rope types and what each is taken for; None: all, for
    themselves. interleaved: as for `RopeSpec`. scales_queries: there is a llama_4_scaling_beta. has_sections: the
    frequencies are in sections, each with positions of its own, which are all the same for text. absent: what stands
    for rope_parameters where there are none.
    """
    # transformers 5 still reads rope_scaling, and prefers it.
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    name, raw = ("rope_scaling", old) if old else ("rope_parameters", new or absent or {})
    if not isinstance(raw, dict) or any(isinstance(value, dict) for value in raw.values()):
        raise ModelError(f"{config.file}: {name} must be one object for all layers, not {raw!r}")
    rope = JsonFields(raw, config.file, name + ".")
    kinds = kinds or ROPE_KINDS
    if has_sections:
        rope.read.update(("mrope_section", "mrope_interleaved"))
    told = rope.one_of(f"{name}.rope_type", rope.text("rope_type", rope.text("type", "default")), tuple(kinds))
    kind = kinds[told]
    theta = rope.number("rope_theta", config.number("rope_theta", theta))
    rotary_dim = _rotary_dim(config, rope, head_dim, partial)
    pretrained = rope.size("original_max_position_embeddings", max_position)
    pretrained = config.size("original_max_position_embeddings", original or pretrained)
    if kind == "dynamic":  # which reads no other length
        pretrained = max_position
    if kind == "dynamic" and rotary_dim == 2:
        raise ModelError(f"{config.file}: {name}.rope_type dynamic needs more than 2 rotated entries of a head")
    beta = 0.0
    if scales_queries and rope.get("llama_4_scaling_beta") != 0:
        beta = rope.number("llama_4_scaling_beta")
    own = _OWN_FIELDS[kind](rope, max_position, pretrained)
    refuse_unknown(rope)
    for key in ("short_factor", "long_factor"):
        factors = own.get(key + "s", ())
        if len(factors) not in (0, rotary_dim // 2):
            raise ModelError(
                f"{config.file}: {name}.{key} must have {rotary_dim // 2} numbers, half of the entries of a head that "
                f"partial_rotary_factor says, not {len(factors)}"
            )
    return RopeSpec(kind, theta, rotary_dim, pretrained, interleaved, beta, **own)


def _rotary_dim(config: JsonFields, rope: JsonFields, head_dim: int, partial: float | None) -> int:
    default = 1.0 if partial is None or config.is_null("partial_rotary_factor") else partial
    share = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", default))
    if share != 1 and partial is None:
        raise ModelError(f"{config.file}: partial_rotary_factor {share} is not supported; supported is 1")
    if share > 1:
        raise ModelError(f"{config.file}: partial_rotary_factor must be at most 1, not {share}")
    rotary_dim = int(head_dim * share)
    if share == 1 and head_dim % 2:
        raise ModelError(f"{config.file}: head_dim {head_dim} is odd, which rotary positions do not support")
    if rotary_dim % 2 or not rotary_dim:
        raise ModelError(
            f"{config.file}: partial_rotary_factor {share} of head_dim {head_dim} is {rotary_dim} entries; "
            "supported is an even number from 2 on"
        )
    return rotary_dim


def _scaled(rope: JsonFields, _max_position: int, _pretrained: int) -> dict[str, Any]:
    return {"factor": rope.number("factor")}


def _llama3(rope: JsonFields, _max_position: int, _pretrained: int) -> dict[str, Any]:
    fields = {name: rope.number(name) for name in ("low_freq_factor", "high_freq_factor", "factor")}
    if fields["low_freq_factor"] == fields["high_freq_factor"]:
        raise ModelError(f"{rope.file}: {rope.prefix}low_freq_factor must differ from high_freq_factor")
    return fields


def _yarn(rope: JsonFields, max_position: int, pretrained: int) -> dict[str, Any]:
    """YaRN (Peng et al., 2023), with the attention factor resolved as transformers does."""
    # A null factor (not an absent one) asks for the ratio of the two contexts.
    factor = rope.number("factor", max_position / pretrained if rope.is_null("factor") else None)

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention, score = temperature(1.0), 1.0
    if rope.get("mscale_all_dim"):
        score = temperature(rope.number("mscale_all_dim"))
    if all([rope.get("mscale"), rope.get("mscale_all_dim")]):
        attention = temperature(rope.number("mscale")) / score
    return {
        "factor": factor,
        "score_factor": score * score,
        "attention_factor": rope.number("attention_factor", attention),
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "truncate": rope.flag("truncate", True),
    }


def _longrope(rope: JsonFields, max_position: int, pretrained: int) -> dict[str, Any]:
    """LongRoPE (Ding et al., 2024), with the attention factor resolved as transformers does."""
    factor = rope.number("factor", max_position / pretrained)
    attention = math.sqrt(1 + math.log(factor) / math.log(pretrained)) if factor > 1 and pretrained > 1 else 1.0
    return {
        "factor": factor,
        "attention_factor": rope.number("attention_factor", attention),
        "short_factors": _factors(rope, "short_factor"),
        "long_factors": _factors(rope, "long_factor"),
    }


def _factors(rope: JsonFields, key: str) -> tuple[float, ...]:
    """A list of positive numbers."""
    told = rope.get(key)
    if told is None:
        raise ModelError(f'{rope.file} has no "{rope.prefix}{key}"')
    if not isinstance(told, list) or not told or not all(type(x) in (int, float) and 0 < x < math.inf for x in told):
        raise ModelError(f"{rope.file}: {rope.prefix}{key} must be a list of positive numbers, not {told!r}")
    return tuple(float(x) for x in told)


# Rope type -> the fields of RopeSpec that only it has, of its object in config.json, the model's context in tokens and
# that of its pretraining.
_OWN_FIELDS: dict[str, Callable[[JsonFields, int, int], dict[str, Any]]] = {
    "default": lambda _rope, _max_position, _pretrained: {},
    "linear": _scaled,
    "dynamic": _scaled,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
# Names of all types, for themselves.
ROPE_KINDS = {kind: kind for kind in _OWN_FIELDS}

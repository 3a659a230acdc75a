"""The text model of Gemma 4, alone or beside towers for images and sound.

Layers without a window have heads of their own size, and may have their own number of KV heads.
"""

from __future__ import annotations

from typing import Any

from rayllm.config.architectures.common import FULL, GATED_ACTIVATIONS, MAX_HEAD_DIM, SLIDING, layer_kinds
from rayllm.config.json_fields import JsonFields
from rayllm.config.known_keys import refuse_unknown
from rayllm.config.model_spec import ExpertsSpec, Gemma4Spec, RouterSpec
from rayllm.config.rope import RopeSpec
from rayllm.errors import ModelError

ROPES: dict[str, dict[str, Any]] = {  # where config.json has none
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
PATTERN = 6  # layers of which the last is without a window


def parse(config: JsonFields, _architecture: str) -> dict[str, Any]:
    return _parse(config, max_position=131072, window=512) | _layer_embeddings(config) | _experts(config)


def parse_unified(config: JsonFields, _architecture: str) -> dict[str, Any]:
    """Of Gemma 4 12B, whose class has neither embeddings for layers nor experts."""
    fields = _parse(config, max_position=262144, window=1024)
    return fields | {"gemma4": _own(config, layer_embedding=0, layer_vocab=0)}


def _parse(config: JsonFields, max_position: int, window: int) -> dict[str, Any]:
    hidden_size, bias = config.size("hidden_size", 2304), config.flag("attention_bias", False)
    num_heads, num_layers = config.size("num_attention_heads", 8), config.size("num_hidden_layers", 30)
    kinds = _layer_types(config, num_layers)
    own = config.size("num_key_value_heads", 4), config.size("head_dim", 256)
    whole = _whole_heads(config, kinds, own)
    if num_heads % whole[0]:
        raise ModelError(f"{config.file}: {whole[0]} KV heads of full layers do not divide {num_heads} heads")
    max_position = config.size("max_position_embeddings", max_position)
    rope, window_rope = _ropes(config, kinds, {SLIDING: own[1], FULL: whole[1]}, max_position)
    if config.is_null("sliding_window"):
        raise ModelError(f"{config.file}: sliding_window must be a positive integer, not null")
    window = config.size("sliding_window", window)
    attention = config.get("use_bidirectional_attention")
    if attention not in (None, "vision"):  # which concerns images alone
        raise ModelError(
            f"{config.file}: use_bidirectional_attention {attention} is not supported; supported is vision"
        )
    return {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": own[0],
        "head_dim": own[1],
        "layer_heads": tuple(own if kind == SLIDING else whole for kind in kinds),
        "kv_layers": _kv_layers(config, kinds),
        "intermediate_size": config.size("intermediate_size", 9216),
        "vocab_size": 262144,
        "max_position_embeddings": max_position,
        "norm_eps": config.number("rms_norm_eps", 1e-6),
        "hidden_act": config.one_of(
            "hidden_activation", config.text("hidden_activation", "gelu_pytorch_tanh"), GATED_ACTIVATIONS
        ),
        "tie_word_embeddings": config.flag("tie_word_embeddings", True),
        "qkv_bias": bias,
        "attention_out_bias": bias,
        "qk_norm": True,
        "attention_scale": 1.0,
        "embedding_scale": hidden_size**0.5,
        "logit_softcap": None
        if config.get("final_logit_softcapping") is None
        else config.number("final_logit_softcapping"),
        "sliding_windows": tuple(window if kind == SLIDING else None for kind in kinds),
        "rope": rope,
        "window_rope": window_rope,
    }


def _layer_types(config: JsonFields, num_layers: int) -> list[str]:
    """transformers takes the last layer for a full one, whatever config.json says."""
    default = [SLIDING if (layer + 1) % PATTERN else FULL for layer in range(num_layers)]
    return [*layer_kinds(config, num_layers, (FULL, SLIDING), default)[:-1], FULL]


def _whole_heads(config: JsonFields, kinds: list[str], own: tuple[int, int]) -> tuple[int, int]:
    """(KV heads, size of a head) of layers without a window.

    transformers 5 writes what they have of their own into per_layer_config, and overlooks the other keys then.
    """
    shares = config.flag("attention_k_eq_v", False)
    told = config.get("num_global_key_value_heads")
    kv_heads = own[0] if told is None or not shares else config.size("num_global_key_value_heads")
    whole = kv_heads, config.size("global_head_dim", 512)
    if "per_layer_config" in config.data:
        layers = config.get("per_layer_config") or {}
        by_layer = dict.fromkeys(range(len(kinds)), own)
        if not isinstance(layers, dict):
            raise ModelError(f"{config.file}: per_layer_config must be an object, not {layers!r}")
        for name, fields in layers.items():
            layer = int(name) if name.isdecimal() else -1
            if layer not in by_layer or not isinstance(fields, dict):
                raise ModelError(f"{config.file}: per_layer_config.{name} must be an object, and of a layer")
            of_layer = JsonFields(fields, config.file, f"per_layer_config.{name}.")
            by_layer[layer] = of_layer.size("num_key_value_heads", own[0]), of_layer.size("head_dim", own[1])
            refuse_unknown(of_layer)
        of_kind = {kind: {by_layer[layer] for layer in by_layer if kinds[layer] == kind} for kind in (SLIDING, FULL)}
        if not of_kind[SLIDING] <= {own} or len(of_kind[FULL]) != 1:
            raise ModelError(
                f"{config.file}: per_layer_config must be the same for all full layers of layer_types, and no others"
            )
        [found] = of_kind[FULL]
        for key, value, other in (
            ("num_global_key_value_heads", whole[0], found[0]),
            ("global_head_dim", whole[1], found[1]),
        ):
            if config.get(key) is not None and value != other:
                raise ModelError(f"{config.file}: {key} {value} is not what per_layer_config says, {other}")
        whole = found
    if whole[1] > MAX_HEAD_DIM:
        raise ModelError(
            f"{config.file}: global_head_dim {whole[1]} is more than the {MAX_HEAD_DIM} that attention supports"
        )
    return whole


def _kv_layers(config: JsonFields, kinds: list[str]) -> tuple[int, ...] | None:
    """Each of the last layers attends to the keys and values of the last one of its kind before them."""
    readers = config.integer("num_kv_shared_layers", 0)
    if not readers:
        return None
    first = len(kinds) - readers
    if not 0 < first < len(kinds) or set(kinds[:first]) != set(kinds):
        raise ModelError(
            f"{config.file}: num_kv_shared_layers {readers} must leave a layer of each of layer_types before them"
        )
    last = {kind: first - 1 - kinds[:first][::-1].index(kind) for kind in set(kinds)}
    return tuple(layer if layer < first else last[kind] for layer, kind in enumerate(kinds))


def _ropes(
    config: JsonFields, kinds: list[str], head_dims: dict[str, int], max_position: int
) -> tuple[RopeSpec, RopeSpec]:
    """The rotary embeddings of full layers, and of those with a window; each kind that there is must have one."""
    told = config.get("rope_parameters") or ROPES
    if not isinstance(told, dict) or any(key not in (FULL, SLIDING) for key in told):
        raise ModelError(f"{config.file}: rope_parameters must have an object for {FULL} and for {SLIDING} layers")
    specs = []
    for kind in (FULL, SLIDING):
        name, head_dim = f"rope_parameters.{kind}", head_dims[kind]
        own = told.get(kind, ROPES[kind] if kind not in kinds else None)
        if not isinstance(own, dict):
            raise ModelError(f"{config.file}: {name} must be an object, not {own!r}")
        if head_dim % 2:
            key = "head_dim" if kind == SLIDING else "global_head_dim"
            raise ModelError(f"{config.file}: {key} {head_dim} is odd, which rotary positions do not support")
        rope = JsonFields(own, config.file, name + ".")
        rope_type = rope.text("rope_type", rope.text("type", "default"))
        rope.one_of(f"{name}.rope_type", rope_type, ("default", "proportional"))
        theta, factor, turning = rope.number("rope_theta"), 1.0, 0
        if rope_type == "proportional":
            factor, share = rope.number("factor", 1.0), rope.number("partial_rotary_factor", 1.0)
            if share > 1:
                raise ModelError(f"{config.file}: {name}.partial_rotary_factor must be at most 1, not {share}")
            turning = int(share * head_dim // 2)
        elif rope.number("partial_rotary_factor", 1.0) != 1:  # which transformers does not read here
            raise ModelError(f"{config.file}: {name}.partial_rotary_factor needs the rope_type proportional")
        refuse_unknown(rope)
        specs.append(RopeSpec(rope_type, theta, head_dim, max_position, factor=factor, turning_pairs=turning))
    return specs[0], specs[1]


def _own(config: JsonFields, layer_embedding: int, layer_vocab: int) -> Gemma4Spec:
    return Gemma4Spec(
        key_is_value=config.flag("attention_k_eq_v", False),
        layer_embedding=layer_embedding,
        layer_vocab=layer_vocab,
        wide_readers=config.flag("use_double_wide_mlp", False),
    )


def _layer_embeddings(config: JsonFields) -> dict[str, Any]:
    size, vocab = config.integer("hidden_size_per_layer_input", 256), config.size("vocab_size_per_layer_input", 262144)
    if size < 0:
        raise ModelError(f"{config.file}: hidden_size_per_layer_input must be at least 0, not {size}")
    if size and vocab < config.size("vocab_size", 262144):
        raise ModelError(f"{config.file}: vocab_size_per_layer_input {vocab} is less than vocab_size")
    return {"gemma4": _own(config, size, vocab)}


def _experts(config: JsonFields) -> dict[str, Any]:
    """Beside the dense MLP of each layer, which is like a shared expert."""
    told = {name: config.get(name) for name in ("num_experts", "top_k_experts", "moe_intermediate_size")}
    if not config.flag("enable_moe_block", False):
        return {}
    if missing := [name for name, value in told.items() if value is None]:
        raise ModelError(f"{config.file}: enable_moe_block needs {' and '.join(missing)}")
    num_experts, top_k = config.size("num_experts"), config.size("top_k_experts")
    if top_k > num_experts:
        raise ModelError(f"{config.file}: top_k_experts {top_k} is more than the {num_experts} experts")
    experts = ExpertsSpec(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=config.size("moe_intermediate_size"),
        sparse_layers=(True,) * config.size("num_hidden_layers", 30),
        router=RouterSpec("softmax", normalised=True, factors=True),
        shared_size=config.size("intermediate_size", 9216),
    )
    return {"experts": experts}

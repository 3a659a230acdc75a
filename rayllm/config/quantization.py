"""`QuantizationSpec`: how a checkpoint stores its weights in fewer bits, from config.json's quantization_config.

Which modules are quantised is told by the tensors of the checkpoint: a weight that is stored as it is, is read as it
is. The lists of modules that config.json has of its own (ignore, modules_to_not_convert) need not be believed, so they
are not, unless weights are made up and there are no tensors. How activations are to be rounded is followed where
products are in fp8, and nowhere else: they stay in the model's dtype then, which is more exact.
Whatever else changes what the stored numbers mean is understood, or refuses the model by the field's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from rayllm.config.json_fields import JsonFields
from rayllm.config.known_keys import refuse_unknown
from rayllm.errors import ModelError

Storage = Literal["fp8", "int8", "packed", "gptq", "awq", "mxfp4"]
# Rows and columns of a weight [out, in] that share a scale; None is all of them.
Block = tuple[int | None, int | None]

# How tokens are rounded to fp8 for a product: by scales found as they come, or by one that the checkpoint has.
Activations = Literal["dynamic", "static"]

MXFP4_GROUP = 32
CLASS = "Linear"  # a target of compressed-tensors for all projections
# What says which modules are quantised, which the tensors tell.
LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore")
LISTS = (*LEFT_OUT, "modules_to_convert", "modules_in_block_to_quantize")
# Of GPTQ and AWQ: how the numbers came about, and which kernels are to compute with them.
MAKING = (
    "act_group_aware batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent dataset"
    " disable_exllama do_fuse exllama_config fuse_max_seq_len hyb_act lm_head max_input_length meta"
    " model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block modules_to_fuse mse"
    " parallel static_groups sym tokenizer true_sequential use_cuda_fp16 use_exllama"
)
# Of compressed-tensors: how scales were found, in which dtype, and that they were.
OBSERVING = "observer observer_kwargs scale_dtype zp_dtype"
STATUS = "quantization_status global_compression_ratio version"


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights are stored. docs/models.md lists the tensors of each.

    bits: of a number. symmetric: there are no stored zero points. ordered: an input's group is stored, as those of
    neighbours may differ. first_form: GPTQ's zero points are stored less one. activations: None if they stay as they
    are.
    """

    storage: Storage
    bits: int
    block: Block
    symmetric: bool = True
    ordered: bool = False
    first_form: bool = False
    activations: Activations | None = None

    def __str__(self) -> str:
        kind = {"packed": f"int{self.bits}", "gptq": f"int{self.bits}, GPTQ", "awq": f"int{self.bits}, AWQ"}
        rows, columns = self.block
        if rows is None:
            sharing = "one scale a tensor"
        elif columns is None:
            sharing = "one scale a channel"
        else:
            sharing = f"groups of {columns}" if rows == 1 else f"blocks of {rows} x {columns}"
        name, _, tool = kind.get(self.storage, self.storage).partition(", ")
        return f"{name} ({', '.join(part for part in (tool, sharing) if part)})"


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """groups: the formats, and the modules that have each: names, patterns as "re:...", or "Linear" for all.

    left_out: modules that are said to have none: parts of their names, or patterns.
    """

    groups: tuple[tuple[tuple[str, ...], WeightFormat], ...]
    left_out: tuple[str, ...] = ()

    def format_of(self, module: str, *aliases: str) -> WeightFormat | None:
        """That of the weights of `module`, if they are quantised. aliases: other names of it.

        A target that is the name goes before a pattern, and that before the class, as in compressed-tensors.
        """
        names = (module, *aliases)
        tests: list[Callable[[str], bool]] = [
            lambda target: target in names,
            lambda target: target.startswith("re:") and any(re.match(target[3:], name) for name in names),
            lambda target: target == CLASS,
        ]
        for fits in tests:
            for targets, found in self.groups:
                if any(fits(target) for target in targets):
                    return found
        return None

    @property
    def is_fp8(self) -> bool:
        """Whether all that is quantised is in fp8."""
        return all(found.storage == "fp8" for _, found in self.groups)

    def made_up(self, module: str) -> WeightFormat | None:
        """The format of a module of whose weights there are no tensors that would tell."""
        for entry in self.left_out:
            if re.match(entry[3:], module) if entry.startswith("re:") else f".{entry}." in f".{module}.":
                return None
        return self.format_of(module)

    def __str__(self) -> str:
        return " and ".join(dict.fromkeys(str(found) for _, found in self.groups))


def parse_quantization(config: JsonFields) -> QuantizationSpec | None:
    """What the quantization_config of config.json says of weights; None if they are not quantised.

    Scales for a KV cache in fp8 alone quantise no weights. Raises ModelError for what is not read exactly.
    """
    told = config.get("quantization_config")
    if not told:
        return None
    fields = _object(told, config, "quantization_config")
    method = fields.text("quant_method", "")
    if not method:
        raise ModelError(f'{fields.file} has no "{fields.prefix}quant_method"')
    spec = METHODS[_one_of(fields, "quant_method", method, METHODS)](fields)
    lists = {name: _list(fields, name) for name in LISTS}
    refuse_unknown(fields)
    left_out = tuple(entry for name in LEFT_OUT for entry in lists[name])
    return None if spec is None else replace(spec, left_out=left_out)


def _fp8(fields: JsonFields) -> QuantizationSpec:
    """Of DeepSeek, Qwen and MiniMax in blocks; of Mistral and AutoFP8 with a scale a tensor."""
    _choice(fields, "fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    static = _choice(fields, "activation_scheme", "dynamic", ("dynamic", "static")) == "static"
    _choice(fields, "scale_fmt", "float", ("float", "ue8m0"))
    _choice(fields, "expert_dtype", "fp8", ("fp8",))
    fields.flag("dequantize", False)  # says how transformers is to compute
    fields.get("kv_cache_scheme")
    shape = fields.get("weight_block_size")
    block: Block = (None, None) if shape is None else _block(fields, "weight_block_size", shape)
    return _everywhere(WeightFormat("fp8", 8, block, activations="static" if static else "dynamic"))


def _gptq(fields: JsonFields) -> QuantizationSpec:
    forms = {
        _choice(fields, name, "gptq", ("gptq", "gptq_v2")) for name in _given(fields, "checkpoint_format", "format")
    }
    if len(forms) > 1:
        raise ModelError(f"{fields.file}: {fields.prefix}format is not that of checkpoint_format")
    fields.text("backend", "")
    _choice(fields, "pack_dtype", "int32", ("int32",))
    dynamic = fields.get("dynamic")
    if dynamic and not (isinstance(dynamic, dict) and all(str(name).startswith("-:") for name in dynamic)):
        raise ModelError(f"{fields.file}: {fields.prefix}dynamic: modules with settings of their own are not supported")
    _ignore(fields, MAKING)
    bits, ordered = _bits(fields, "bits", (4, 8)), fields.flag("desc_act", False)
    return _everywhere(
        WeightFormat("gptq", bits, _groups(fields), symmetric=False, ordered=ordered, first_form="gptq_v2" not in forms)
    )


def _awq(fields: JsonFields) -> QuantizationSpec:
    for name in ("version", "format"):
        _choice(fields, name, "gemm", ("gemm",))
    _choice(fields, "pack_dtype", "int32", ("int32",))
    _choice(fields, "backend", "auto", ("auto", "autoawq"))
    fields.flag("zero_point", True)  # zero points are stored either way
    _ignore(fields, MAKING)
    return _everywhere(WeightFormat("awq", _bits(fields, "bits", (4,), 4), _groups(fields), symmetric=False))


def _mxfp4(fields: JsonFields) -> QuantizationSpec:
    fields.flag("dequantize", False)  # says how transformers is to compute
    return _everywhere(WeightFormat("mxfp4", 4, (1, MXFP4_GROUP)))


PLAIN_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")


def _compressed_tensors(fields: JsonFields) -> QuantizationSpec | None:
    _ignore(fields, STATUS)
    fields.get("kv_cache_scheme")
    sparsity = fields.get("sparsity_config")
    if sparsity and _object(sparsity, fields, "sparsity_config").text("format", "dense") != "dense":
        raise ModelError(f"{fields.file}: {fields.prefix}sparsity_config: sparse weights are not supported")
    told = fields.get("config_groups")
    if not told:
        if fields.get("kv_cache_scheme"):
            fields.get("format")
            return None
        raise ModelError(f'{fields.file} has no "{fields.prefix}config_groups"')
    form = fields.text("format", "")
    groups = [_group(_object(group, *of), form) for of, group in _members(_object(told, fields, "config_groups"))]
    return QuantizationSpec(tuple(groups))


def _members(fields: JsonFields) -> list[tuple[tuple[JsonFields, str], Any]]:
    return [((fields, name), fields.get(name)) for name in fields.data]


def _group(fields: JsonFields, form: str) -> tuple[tuple[str, ...], WeightFormat]:
    """One of config_groups. form: of those that have none of their own."""
    targets = fields.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise ModelError(f"{fields.file}: {fields.prefix}targets must be a list of strings, not {targets!r}")
    for target in targets:
        _check_pattern(fields, "targets", target)
    form = _one_of(fields, "format", fields.text("format", form), PLAIN_FORMATS)
    activations = _activations(fields)
    weights = _object(fields.get("weights"), fields, "weights")
    refuse_unknown(fields)
    found = _packed_weights(weights) if form == "pack-quantized" else _plain_weights(weights, form)
    _ignore(weights, OBSERVING)
    refuse_unknown(weights)
    return tuple(targets), replace(found, activations=activations) if found.storage == "fp8" else found


def _activations(fields: JsonFields) -> Activations | None:
    """Of compressed-tensors; None for all that no product rounds to, which stays as exact as it is."""
    told = fields.get("input_activations")
    if not told:
        return None
    inner = _object(told, fields, "input_activations")
    if inner.get("num_bits", 8) != 8 or inner.get("type", "float") != "float":
        return None
    if inner.get("dynamic", False):
        return "dynamic"
    return "static" if inner.get("strategy", "tensor") == "tensor" else None


def _plain_weights(weights: JsonFields, form: str) -> WeightFormat:
    """Numbers of 8 bits, one an element."""
    kinds = {"float-quantized": ("float",), "int-quantized": ("int",)}.get(form, ("float", "int"))
    kind = _choice(weights, "type", "int", kinds)
    bits = _bits(weights, "num_bits", (8,), 8)
    symmetric, block = weights.flag("symmetric", True), _strategy(weights, ("tensor", "channel", "group", "block"))
    if kind == "float" and not symmetric:
        raise ModelError(f"{weights.file}: {weights.prefix}symmetric must be true for type float")
    return WeightFormat("fp8" if kind == "float" else "int8", bits, block, symmetric=symmetric)


def _packed_weights(weights: JsonFields) -> WeightFormat:
    """Whole numbers, several to a word."""
    _choice(weights, "type", "int", ("int",))
    bits, symmetric = _bits(weights, "num_bits", (4, 8), 8), weights.flag("symmetric", True)
    block, order = _strategy(weights, ("channel", "group")), weights.get("actorder")
    # By weight, it was the order of rounding alone.
    if isinstance(order, str):
        order = _choice(weights, "actorder", "", ("weight", "static", "group", "dynamic")) in ("group", "dynamic")
    elif order not in (None, True, False):
        raise ModelError(f"{weights.file}: {weights.prefix}actorder must be a string, not {order!r}")
    return WeightFormat("packed", bits, block, symmetric=symmetric, ordered=bool(order))


def _strategy(weights: JsonFields, supported: tuple[str, ...]) -> Block:
    """Which weights share a scale."""
    size = weights.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = _choice(weights, "strategy", default, supported)
    if strategy == "group":
        return 1, weights.size("group_size")
    if size not in (None, -1):
        raise ModelError(f"{weights.file}: {weights.prefix}group_size {size} needs the strategy group, not {strategy}")
    if strategy == "block":
        return _block(weights, "block_structure", weights.get("block_structure"))
    return (1, None) if strategy == "channel" else (None, None)


METHODS: dict[str, Callable[[JsonFields], QuantizationSpec | None]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}


# What `--quantization fp8` makes of weights that are stored as they are.
FP8_BY_CHANNEL = WeightFormat("fp8", 8, (1, None), activations="dynamic")


def _everywhere(found: WeightFormat) -> QuantizationSpec:
    return QuantizationSpec((((CLASS,), found),))


def _object(value: Any, fields: JsonFields, name: str) -> JsonFields:
    """The object `name` within `fields`."""
    if not isinstance(value, dict):
        raise ModelError(f"{fields.file}: {fields.prefix}{name} must be an object, not {value!r}")
    return JsonFields(value, fields.file, f"{fields.prefix}{name}.")


def _one_of(fields: JsonFields, name: str, value: str, supported: Iterable[str]) -> str:
    return fields.one_of(fields.prefix + name, value, tuple(supported))


def _choice(fields: JsonFields, name: str, default: str, supported: tuple[str, ...]) -> str:
    return _one_of(fields, name, fields.text(name, default).lower(), supported)


def _list(fields: JsonFields, name: str) -> list[str]:
    told = fields.get(name)
    if told is not None and not isinstance(told, list):
        raise ModelError(f"{fields.file}: {fields.prefix}{name} must be a list of modules, not {told!r}")
    for entry in told or []:
        _check_pattern(fields, name, str(entry))
    return [str(entry) for entry in told or []]


def _block(fields: JsonFields, name: str, value: Any) -> Block:
    if not (isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)):
        raise ModelError(f"{fields.file}: {fields.prefix}{name} must be two positive integers, not {value!r}")
    return value[0], value[1]


def _given(fields: JsonFields, *names: str) -> list[str]:
    return [name for name in names if fields.get(name) is not None]


def _bits(fields: JsonFields, name: str, supported: tuple[int, ...], default: int | None = None) -> int:
    bits = fields.size(name, default)
    _one_of(fields, name, str(bits), map(str, supported))
    return bits


def _groups(fields: JsonFields) -> Block:
    """Of GPTQ and AWQ: so many inputs share a scale, -1 for all."""
    size = fields.integer("group_size", 128)
    if size != -1 and size < 1:
        raise ModelError(f"{fields.file}: {fields.prefix}group_size must be a positive integer or -1, not {size}")
    return 1, None if size == -1 else size


def _check_pattern(fields: JsonFields, name: str, target: str) -> None:
    try:
        re.compile(target[3:] if target.startswith("re:") else "")
    except re.error as error:
        raise ModelError(f"{fields.file}: {fields.prefix}{name}: {target} is no pattern: {error}") from None


def _ignore(fields: JsonFields, names: str) -> None:
    fields.read.update(names.split())

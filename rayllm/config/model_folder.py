"""A model's folder in the form of Hugging Face: what its config.json says of the model, and its sampling defaults.

Reads the files of transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype) without
importing either it or torch. A key that is absent takes the default of transformers' class of that architecture. One
that nothing here reads refuses the model, unless `known_keys` has it as harmless.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rayllm.api.sampling_params import SamplingParams
from rayllm.config.architectures import Architecture, find_architecture
from rayllm.config.architectures.common import make_spec
from rayllm.config.json_fields import JsonFields, read_json_object
from rayllm.config.known_keys import TOWERS, refuse_unknown
from rayllm.config.model_spec import ModelSpec
from rayllm.config.quantization import parse_quantization
from rayllm.errors import InvalidRequestError, ModelError

GENERATION_CONFIG = "generation_config.json"
MAX_LAYERS = 4096
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
# Keys beside text_config that hold for the text model too, and win.
OF_THE_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id")
# Fields of that file -> those of `SamplingParams`.
SAMPLING_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


def load_model_spec(path: str) -> ModelSpec:
    """Read the folder `path`. Raises ModelError in one sentence for anything that cannot be served."""
    folder = Path(path)
    if not os.path.exists(folder):  # False too for names that are too long
        raise ModelError(f"model folder {path} does not exist")
    if not folder.is_dir():
        raise ModelError(f"model {path} is not a folder")
    if not (folder / "config.json").is_file():
        state = "has no config.json" if any(folder.iterdir()) else "is empty"
        raise ModelError(f"model folder {path} {state}")
    config = JsonFields(read_json_object(folder / "config.json"), str(folder / "config.json"))
    name, architecture = _architecture(config)
    quantization = parse_quantization(config)
    text = _text_part(config, architecture)
    for key in ("num_hidden_layers", "n_layer"):
        layers = text.data.get(key)
        if type(layers) is int and layers > MAX_LAYERS:  # nothing is made of so many first
            raise ModelError(f"{text.file}: {text.prefix}{key} must be at most {MAX_LAYERS}, not {layers}")
    default = architecture.eos_token_id
    eos = text.get("eos_token_id", default)
    if eos is None and isinstance(default, list):
        eos = default
    generation = folder / GENERATION_CONFIG
    if generation.is_file():
        # Chat models end a turn with a token that only this file knows.
        told = read_json_object(generation).get("eos_token_id")
        eos = eos if told is None else told
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ModelError(f"{path}: eos_token_id must be an integer or a list of integers, 0 or more, not {eos!r}")
    fields = architecture.parse(text, name) | {"quantization": quantization}
    spec = make_spec(text, architecture=name, eos_token_ids=ids, text_only=bool(architecture.text_types), **fields)
    towers = TOWERS if architecture.text_types else frozenset()
    refuse_unknown(text, towers)
    if text is not config:
        same = {key for key, value in config.data.items() if text.data.get(key) == value}  # said twice
        if not any(spec.sliding_windows):
            # transformers 4.52 to 4.57 left Qwen2.5-VL's unused window beside text_config, and made it null within.
            same |= {"sliding_window", "max_window_layers"}
        refuse_unknown(config, towers | same)
    return spec


def load_sampling_defaults(path: str) -> dict[str, Any]:
    """How the folder `path` says to sample, as fields of `SamplingParams`; null says nothing. Raises ModelError."""
    file = Path(path) / GENERATION_CONFIG
    told = read_json_object(file) if file.is_file() else {}
    defaults = {field: told[name] for name, field in SAMPLING_FIELDS.items() if told.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise ModelError(f"{file}: {error} (generation_config none would ignore it)") from None
    return defaults


def indexed_weights(folder: Path) -> dict[str, str] | None:
    """Name of each weight -> name of its file, as the folder's index has it; None without one. Raises ModelError."""
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        return None
    files = read_json_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ModelError(f'{index} has no "weight_map" of weight names to file names')
    if outside := [file for file in files.values() if Path(file).is_absolute() or ".." in Path(file).parts]:
        raise ModelError(f"{index} names {outside[0]}, which is no file of this folder")
    return files


def _architecture(config: JsonFields) -> tuple[str, Architecture]:
    names = config.get("architectures")
    if not names:
        raise ModelError(f'{config.file} has no "architectures"')
    name = str(names[0] if isinstance(names, list) else names)
    architecture = find_architecture(name)
    model_type = architecture.model_type
    if (told := config.text("model_type", model_type)) != model_type:  # transformers would make a model of that class
        raise ModelError(f"{config.file}: model_type {told} is not that of the architectures, {name}")
    return name, architecture


def _text_part(config: JsonFields, architecture: Architecture) -> JsonFields:
    """What config.json says of the text model: all, or its text_config where there are towers beside it."""
    if not architecture.text_types or (config.get("text_config") is None and "hidden_size" in config.data):
        return config  # of the latter, old files of Qwen2.5-VL
    told = config.get("text_config")
    if not isinstance(told, dict):
        raise ModelError(f"{config.file}: text_config must be an object, not {told!r}")
    outer = {key: config.get(key) for key in OF_THE_WHOLE}
    if told.get("tie_word_embeddings") and outer["tie_word_embeddings"] is False:
        raise ModelError(f"{config.file}: tie_word_embeddings is true in text_config and false beside it")
    text = JsonFields(told | {k: v for k, v in outer.items() if v is not None}, config.file, "text_config.")
    text.get("architectures")
    kind = text.text("model_type", architecture.text_types[0])
    text.one_of("text_config.model_type", kind, architecture.text_types)
    return text

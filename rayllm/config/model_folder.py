"""A model's folder in the form of Hugging Face: what its config.json says of the model, and its sampling defaults.

Reads the files of transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype) without
importing either it or torch. A key that is absent takes the default of transformers' class of that architecture. One
that nothing here reads refuses the model, unless `known_keys` has it as harmless.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayllm.api.sampling_params import SamplingParams
from rayllm.config.architectures import ARCHITECTURES
from rayllm.config.architectures.common import make_spec
from rayllm.config.json_fields import JsonFields, read_json_object
from rayllm.config.known_keys import refuse_unknown
from rayllm.config.model_spec import ModelSpec
from rayllm.config.quantization import parse_quantization
from rayllm.errors import InvalidRequestError, ModelError

GENERATION_CONFIG = "generation_config.json"
# Fields of that file -> those of `SamplingParams`.
SAMPLING_FIELDS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


def load_model_spec(path: str) -> ModelSpec:
    """Read the folder `path`. Raises ModelError in one sentence for anything that cannot be served."""
    folder = Path(path)
    if not folder.exists():
        raise ModelError(f"model folder {path} does not exist")
    if not folder.is_dir():
        raise ModelError(f"model {path} is not a folder")
    if not (folder / "config.json").is_file():
        state = "has no config.json" if any(folder.iterdir()) else "is empty"
        raise ModelError(f"model folder {path} {state}")
    config = JsonFields(read_json_object(folder / "config.json"), str(folder / "config.json"))
    architecture = _architecture(config)
    quantization = parse_quantization(config)
    eos = config.get("eos_token_id", ARCHITECTURES[architecture].eos_token_id)
    generation = folder / GENERATION_CONFIG
    if generation.is_file():
        # Chat models end a turn with a token that only this file knows.
        told = read_json_object(generation).get("eos_token_id")
        eos = eos if told is None else told
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(i, int) for i in ids):
        raise ModelError(f"{path}: eos_token_id must be an integer or a list of integers, not {eos!r}")
    fields = ARCHITECTURES[architecture].parse(config, architecture)
    spec = make_spec(config, architecture=architecture, eos_token_ids=ids, quantization=quantization, **fields)
    refuse_unknown(config)
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


def _architecture(config: JsonFields) -> str:
    names = config.get("architectures")
    if not names:
        raise ModelError(f'{config.file} has no "architectures"')
    name = names[0] if isinstance(names, list) else names
    if name not in ARCHITECTURES:
        raise ModelError(f"architectures: {name} is not supported; supported are {', '.join(ARCHITECTURES)}")
    model_type = ARCHITECTURES[name].model_type
    if (told := config.text("model_type", model_type)) != model_type:  # transformers would make a model of that class
        raise ModelError(f"{config.file}: model_type {told} is not that of the architectures, {name}")
    return str(name)

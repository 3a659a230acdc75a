"""What the folder of an adapter says: PEFT's adapter_config.json, of LoRA alone.

A key that changes what is computed and that nothing here computes refuses the adapter by its name, unless its value is
PEFT's default.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayllm.config.json_fields import read_json_object
from rayllm.errors import ModelError, RayllmError

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
# How the file came to be, or what matters while an adapter is trained. Which modules it has, its tensors say.
_HARMLESS = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
# Others change the base model's weights too, when the adapter is made.
_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """How an adapter's pairs of matrices are meant."""

    folder: str
    # The rank and alpha of modules that no pattern names.
    r: int
    alpha: float
    # The factor is alpha / sqrt(rank) instead of alpha / rank.
    rslora: bool
    # By patterns of the modules' names, as PEFT takes them.
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    # Names of modules, or the ends of names; a regular expression; or "all-linear".
    targets: list[str] | str

    def rank(self, module: str) -> int:
        """Of the adapter's matrices for this module."""
        return self.rank_pattern.get(_key(self.rank_pattern, module), self.r)

    def scale(self, module: str) -> float:
        """By which the product of the matrices is multiplied."""
        alpha, rank = self.alpha_pattern.get(_key(self.alpha_pattern, module), self.alpha), self.rank(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def is_target(self, module: str) -> bool:
        """Whether PEFT would use matrices for this module."""
        if isinstance(self.targets, str):
            return self.targets == "all-linear" or re.fullmatch(self.targets, module) is not None
        return any(module == each or module.endswith(f".{each}") for each in self.targets)


def read_lora_config(folder: str) -> LoraConfig:
    """Read an adapter's folder. Raises ModelError for one that cannot be served, naming the key at fault."""
    path = Path(folder)
    if not path.is_dir():
        raise ModelError(f"adapter folder {folder} does not exist")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (path / name).is_file():
            raise ModelError(f"adapter folder {folder} has no {name}")
    file = path / CONFIG_FILE
    told = dict(read_json_object(file))
    if (kind := told.pop("peft_type", None)) != "LORA":
        raise ModelError(f"{file}: peft_type must be LORA, not {kind}")
    if (bias := told.pop("bias", "none")) != "none":
        raise ModelError(f"{file}: bias must be none, not {bias}")
    if (init := told.pop("init_lora_weights", None)) not in _INITS:
        raise ModelError(f"{file}: init_lora_weights {init} changes the base model's weights, which is not supported")
    config = LoraConfig(
        folder=folder,
        r=_number(told, file, "r", int),
        alpha=_number(told, file, "lora_alpha", int | float),
        rslora=_flag(told, file, "use_rslora"),
        rank_pattern=_pattern(told, file, "rank_pattern", int),
        alpha_pattern=_pattern(told, file, "alpha_pattern", int | float),
        targets=_targets(told, file),
    )
    for key, value in told.items():
        if key not in _HARMLESS and value:
            raise ModelError(f"{file}: {key} is not supported")
    return config


@contextmanager
def naming_adapter(name: str) -> Iterator[None]:
    """Turn errors into a ModelError that names the option lora_modules and this adapter of it."""
    try:
        yield
    except RayllmError as error:
        raise ModelError(f"lora_modules: {name}: {error}") from error


def adapter_digest(folder: str) -> str:
    """Of all that `read_lora_config` and the workers read, so that they read the same. Raises ModelError."""
    digest = hashlib.sha256()
    try:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            with open(Path(folder, name), "rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise ModelError(f"adapter folder {folder} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _key(pattern: dict[str, Any], module: str) -> str:
    """The first key of a pattern that the module's name ends with."""
    return next((key for key in pattern if re.match(rf"(.*\.)?({key})$", module)), module)


def _number(told: dict[str, Any], file: Path, key: str, kind: Any) -> Any:
    value = told.pop(key, 8)  # PEFT's default of both
    if not isinstance(value, kind) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"{file}: {key} must be a positive number, not {value!r}")
    return value


def _flag(told: dict[str, Any], file: Path, key: str) -> bool:
    value = told.pop(key, None)
    if not isinstance(value, bool | None):
        raise ModelError(f"{file}: {key} must be true or false, not {value!r}")
    return bool(value)


def _pattern(told: dict[str, Any], file: Path, key: str, kind: Any) -> dict[str, Any]:
    pattern = told.pop(key, None) or {}
    if not isinstance(pattern, dict) or not all(isinstance(value, kind) and value > 0 for value in pattern.values()):
        raise ModelError(f"{file}: {key} must map names of modules to positive numbers")
    for name in pattern:
        _check_regex(name, file, key)
    return pattern


def _targets(told: dict[str, Any], file: Path) -> list[str] | str:
    targets = told.pop("target_modules", None)
    if isinstance(targets, str) and targets:
        _check_regex(targets, file, "target_modules")
        return targets
    if not isinstance(targets, list) or not targets or not all(isinstance(each, str) for each in targets):
        raise ModelError(f"{file}: target_modules must be a list of names, a regular expression or all-linear")
    return targets


def _check_regex(pattern: str, file: Path, key: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ModelError(f"{file}: {key}: {pattern!r} is no regular expression: {error}") from None

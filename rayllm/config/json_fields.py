"""JSON files of a model folder, read with errors that name the file and the field."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayllm.errors import ModelError


@dataclass(frozen=True, slots=True)
class JsonFields:
    """A JSON object with typed access; `file` and `prefix` name it in errors. null counts as absent.

    Each getter raises ModelError for a value of the wrong kind, and for an absent one unless it has a default.
    """

    data: dict[str, Any]
    file: str
    prefix: str = ""

    def size(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default, (int,), "a positive integer")
        if value < 1:
            raise ModelError(f"{self.file}: {self.prefix}{name} must be a positive integer, not {value}")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = float(self._get(name, default, (int, float), "a positive number"))
        if not 0 < value < math.inf:
            raise ModelError(f"{self.file}: {self.prefix}{name} must be a positive number, not {value}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._get(name, default, (bool,), "true or false"))

    def text(self, name: str, default: str) -> str:
        return str(self._get(name, default, (str,), "a string"))

    def integer_or_none(self, name: str) -> int | None:
        value = self.data.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ModelError(f"{self.file}: {self.prefix}{name} must be an integer, not {value!r}")
        return value

    def is_null(self, name: str) -> bool:
        """Whether the field is there and says null, for the few whose null is not their default."""
        return name in self.data and self.data[name] is None

    def _get(self, name: str, default: Any, kinds: tuple[type, ...], what: str) -> Any:
        value = self.data.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f'{self.file} has no "{self.prefix}{name}"')
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ModelError(f"{self.file}: {self.prefix}{name} must be {what}, not {value!r}")
        return value


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in the file `path`. Raises ModelError if it cannot be read or holds anything else."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(loaded).__name__}")
    return loaded

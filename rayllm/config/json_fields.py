"""JSON files of a model folder, read with errors that name the file and the field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayllm.errors import ModelError

LFS_POINTER = b"version https://git-lfs."  # how one begins


@dataclass(frozen=True, slots=True)
class JsonFields:
    """A JSON object with typed access; `file` and `prefix` name it in errors. null counts as absent.

    Each typed getter raises ModelError for a value of the wrong kind, and for an absent one unless it has a default.
    read: the fields that a getter was asked for, there or not.
    """

    data: dict[str, Any]
    file: str
    prefix: str = ""
    read: set[str] = field(default_factory=set)

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is, null too."""
        self.read.add(name)
        return self.data.get(name, default)

    def size(self, name: str, default: int | None = None) -> int:
        return int(self._get(name, default, "a positive integer", lambda value: type(value) is int and value > 0))

    def integer(self, name: str, default: int) -> int:
        return int(self._get(name, default, "an integer", lambda value: type(value) is int))

    def number(self, name: str, default: float | None = None) -> float:
        return float(
            self._get(name, default, "a positive number", lambda x: type(x) in (int, float) and 0 < x < math.inf)
        )

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._get(name, default, "true or false", lambda value: isinstance(value, bool)))

    def text(self, name: str, default: str) -> str:
        return str(self._get(name, default, "a string", lambda value: isinstance(value, str)))

    def one_of(self, what: str, value: str, supported: tuple[str, ...]) -> str:
        """`value` if it is supported. what: of which it is a value, for the error."""
        if value not in supported:
            raise ModelError(f"{self.file}: {what} {value} is not supported; supported are {', '.join(supported)}")
        return value

    def only(self, supported: Mapping[str, Any]) -> None:
        """Refuse these fields where they are there and say something else."""
        for name, value in supported.items():
            told = self.get(name)
            if told is not None and (told != value or isinstance(told, bool) != isinstance(value, bool)):
                raise ModelError(f"{self.file}: {name} {told!r} is not supported; supported is {value!r}")

    def is_null(self, name: str) -> bool:
        """Whether the field is there and says null, for the few whose null is not their default."""
        return self.get(name, ...) is None

    def _get(self, name: str, default: Any, what: str, fits: Callable[[Any], bool]) -> Any:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelError(f'{self.file} has no "{self.prefix}{name}"')
        if not fits(value):
            raise ModelError(f"{self.file}: {self.prefix}{name} must be {what}, not {value!r}")
        return value


def about_damage(path: Path) -> str:
    """What may be added to an error about a file that cannot be read: whether it is only a pointer of Git LFS."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            return " (it is a pointer of Git LFS in place of the file, which `git lfs pull` gets)"
    return ""


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in the file `path`. Raises ModelError if it cannot be read or holds anything else."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}{about_damage(path)}") from None
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(loaded).__name__}")
    return loaded

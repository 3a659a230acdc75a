"""Arguments that a model writes as plain text between tags, made into a JSON object by the tool's schema.

A string stays as it is written. A value of another type is JSON, or Python's True, False and None; if it is not of a
type that the schema allows, it is a string.
"""

from __future__ import annotations

import json
from typing import Any

from rayllm.serve.http.chat_format.calls import Calls
from rayllm.serve.http.chat_format.text_source import BEFORE_TAG, Reading, TextSource

_PYTHONS = {"True": "true", "False": "false", "None": "null"}
_MAX_PARTS = 64  # of a schema, that are looked at for one argument


class ArgumentsWriter:
    """Writes the arguments of the call that was begun last, one after the other."""

    def __init__(self, calls: Calls, name: str):
        self._calls = calls
        self._schema = calls.offered[name]
        self._next = "{"  # what stands before the next argument

    def read_value(
        self, key: str, closing: str, *, lines: bool = False, types: set[str] | None = None
    ) -> Reading[bool]:
        """Read an argument's text up to `closing`, and that too. False if it breaks off.

        lines: the text is on lines of its own, so a line break at its beginning and one at its end do not count.
        types: those of JSON that it may have, empty for any; None for those of the schema.
        """
        source, types = self._calls.source, argument_types(self._schema, key) if types is None else types
        start = f"{self._next}{json.dumps(key, ensure_ascii=False)}: "
        as_string = types == {"string"}
        if as_string:
            self._calls.add(start + '"')
        if lines:
            yield from source.take("\n")
        held = ""  # a line break that may be the last
        whole: list[str] = []
        while run := (yield from source.take_before(closing, BEFORE_TAG)):
            run, held = held + run, ""
            if lines and run.endswith("\n"):
                run, held = run[:-1], "\n"
            if as_string:
                self._calls.add(json.dumps(run, ensure_ascii=False)[1:-1])
            else:
                whole.append(run)
        if not (yield from source.take(closing)):
            return False
        self._calls.add('"' if as_string else start + as_json("".join(whole), types))
        self._next = ", "
        return True

    def end(self) -> None:
        """All arguments have been read."""
        self._calls.add("{}" if self._next == "{" else "}")


def skip_before(source: TextSource, closing: str) -> Reading[None]:
    """Take all text before a tag."""
    while (yield from source.take_before(closing, BEFORE_TAG)):
        pass


def as_json(text: str, types: set[str]) -> str:
    """The JSON text of a value of one of these types; of any type if there are none."""
    written = text.strip()
    written = _PYTHONS.get(written, written)
    try:
        kind = _type_of(json.loads(written, parse_constant=_refuse))
        if not types or kind in types or (kind == "integer" and "number" in types):
            return written
    except (ValueError, RecursionError):
        pass
    return json.dumps(text, ensure_ascii=False)


def argument_types(schema: dict[str, Any], key: str) -> set[str]:
    """The JSON types that an argument may have, as far as the schema says it; empty if any."""
    properties = schema.get("properties")
    part = properties.get(key) if isinstance(properties, dict) else None
    if part is None:
        part = schema.get("additionalProperties")
    found: set[str] = set()
    parts = [part]
    for _ in range(_MAX_PARTS):
        if not parts:
            return found
        kinds = _own_types(part := parts.pop())
        if kinds:
            found |= kinds
        elif isinstance(part, dict) and isinstance(part.get("$ref"), str):
            parts.append(_referred(part["$ref"], schema))
        elif isinstance(part, dict) and isinstance(choices := part.get("anyOf", part.get("oneOf")), list) and choices:
            parts += choices
        else:
            break
    return set()


def _own_types(part: Any) -> set[str]:
    """The types that a part of a schema names itself."""
    if not isinstance(part, dict):
        return set()
    if isinstance(part.get("type"), str):
        return {part["type"]}
    if isinstance(part.get("type"), list):
        return {kind for kind in part["type"] if isinstance(kind, str)}
    if isinstance(part.get("enum"), list):
        return {_type_of(value) for value in part["enum"]}
    return {_type_of(part["const"])} if "const" in part else set()


def _referred(reference: str, schema: dict[str, Any]) -> Any:
    """What a reference within the schema means; None if it leads nowhere."""
    place: Any = schema if reference.startswith("#") else None
    for step in reference.split("/")[1:]:
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
    return place


def _type_of(value: Any) -> str:
    """A JSON value's type in JSON schema's words."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds[type(value)]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")

"""`tool_choice` "required" or a named tool, as a JSON schema that the engine enforces on the whole output."""

from __future__ import annotations

import json
from typing import Any

from rayllm.serve.http.protocol_parts import Tool

# Keywords whose value is a map of names to schemas, and keywords whose value is data, not a schema.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum", "default", "examples")


def calls_schema(tools: list[Tool], single: bool, arguments_key: str) -> str:
    """The schema, as JSON text, of one call (single) or an array of at least one, each of one of `tools`.

    arguments_key: "arguments" or "parameters", whichever the model is used to.
    """
    calls = []
    definitions = {}
    for index, tool in enumerate(tools):
        name = f"tool_{index}"
        definitions[name] = _moved(tool.function.parameters or {"type": "object"}, f"#/$defs/{name}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, arguments_key: {"$ref": f"#/$defs/{name}"}},
                "required": ["name", arguments_key],
                "additionalProperties": False,
            }
        )
    call: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = call if single else {"type": "array", "minItems": 1, "items": call}
    return json.dumps(schema | {"$defs": definitions}, ensure_ascii=False)


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references to itself rewritten for its new place within a larger one."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = place + value[1:]
        elif key in _MAPS and isinstance(value, dict):
            moved[key] = {name: _moved(part, place) for name, part in value.items()}
        else:
            moved[key] = value if key in _DATA else _moved(value, place)
    return moved

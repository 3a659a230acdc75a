"""Grammars of tool calls."""

from __future__ import annotations

import json
from typing import Any

from rayllm.serve.http.protocol import Tool


def calls_schema(tools: list[Tool], single: bool, arguments_key: str) -> str:
    """The JSON schema, as text, of one call (single) or of an array of at least one, each of one of `tools`.

    arguments_key: "arguments" or "parameters", whichever the model is used to.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, arguments_key: {"$ref": f"tool_{index}"}},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    # With an id of its own, the references of a tool's schema go on meaning places in that schema.
    parameters = [tool.function.parameters or {"type": "object"} for tool in tools]
    definitions = {f"tool_{index}": {**schema, "$id": f"tool_{index}"} for index, schema in enumerate(parameters)}
    call: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema = call if single else {"type": "array", "minItems": 1, "items": call}
    return json.dumps(schema | {"$defs": definitions}, ensure_ascii=False)

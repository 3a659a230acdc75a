"""Writes grammars in Lark's notation as llguidance reads it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rayllm.text.json_schema import closed, enforceable

# At most one space between tokens of JSON text. With more room, a model that does not know how to go on fills all of
# it, at every place, and runs into max_tokens.
COMPACT = {"whitespace_pattern": " "}
ANY_TEXT = "/(?s:.*)/"
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_BEFORE_REGEX_END = re.compile(r"\\.|/|\n", re.DOTALL)

Schemas = Mapping[str, dict[str, Any]]  # of the parameters of tools, by their names; empty if a tool has none


class Lark:
    """A grammar that is being written. Its terminal NL is a line break.

    special_id: the id of a special token by its text, which text cannot spell; None if that is none.
    """

    def __init__(self, special_id: Callable[[str], int | None]):
        self._special_id = special_id
        self._rules: list[str] = []

    def rule(self, expression: str, options: str = "") -> str:
        """The name of a new rule. options: as they stand behind a rule's name."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def recursive(self, expression: Callable[[str], str]) -> str:
        """The name of a new rule, whose expression is made of that name."""
        place = len(self._rules)
        name = self.rule("")
        self._rules[place] += expression(name)
        return name

    def tag(self, *parts: str) -> str:
        """A tag of these parts, each of which is a token or spelled out."""
        tokens = {part: self._special_id(part) for part in parts}
        return " ".join(literal(part) if tokens[part] is None else f"<[{tokens[part]}]>" for part in parts)

    def through(self, *tag: str) -> str:
        """Any text, up to and with a tag of these parts."""
        spelled = next((i for i, part in enumerate(tag) if self._special_id(part) is not None), len(tag))
        if not spelled:
            return self.rule(f"{ANY_TEXT} {self.tag(*tag)}")
        # What is spelled out before a token may come in the text too, without the token.
        piece = self.rule(f"/(?s:.*){escaped(re.escape(''.join(tag[:spelled])))}/", "[lazy]")
        return self.rule(f"{piece}+ {self.tag(*tag[spelled:])}") if spelled < len(tag) else piece

    def json(self, schema: dict[str, Any]) -> str:
        """A value by a JSON schema."""
        return self.rule(f"%json {json.dumps(enforceable(schema, **COMPACT), ensure_ascii=False)}")

    def arguments(self, schema: dict[str, Any]) -> str:
        """The arguments of a tool with this schema."""
        return self.json(schema or NO_ARGUMENTS)

    def source(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules, "NL: /\\n/"]) + "\n"


def literal(text: str) -> str:
    return json.dumps(text)  # a string in Lark is one in JSON


def escaped(regex: str) -> str:
    """A regular expression as it stands between slashes."""
    return _BEFORE_REGEX_END.sub(lambda match: {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(match[0], match[0]), regex)


def array_of(call: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of at least one of what another schema describes."""
    items = {name: part for name, part in call.items() if name != "$defs"}
    return {"type": "array", "minItems": 1, "items": items, "$defs": call.get("$defs", {})}


def one_or_more(call: str, separator: str, single: bool) -> str:
    """The expression of one call, or of several."""
    return call if single else f"{call} ({separator} {call})*"


def call_schema(schemas: Schemas, arguments: str) -> dict[str, Any]:
    """The JSON schema of a call of one of these tools. arguments: the key of its arguments."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: {"$ref": f"tool_{index}"}},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for index, name in enumerate(schemas)
    ]
    # With an id of its own, the references of a tool's schema go on meaning places in that schema.
    definitions = {
        f"tool_{index}": closed(schema or NO_ARGUMENTS) | {"$id": f"tool_{index}"}
        for index, schema in enumerate(schemas.values())
    }
    return (calls[0] if len(calls) == 1 else {"anyOf": calls}) | {"$defs": definitions}

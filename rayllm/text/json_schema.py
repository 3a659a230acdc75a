"""Which of a JSON schema's demands a grammar does not enforce, how such a schema is taken all the same, and what is
enforced beyond it.

The library refuses a schema with keywords that it does not know how to enforce. Agents' schemas have them, and a model
mostly keeps to them by itself, so they are left out of the grammar, and the answer says which.

An object that lists its properties gets no others, unless its schema says so: see `closed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

OPTIONS = "x-guidance"  # the key of the library's own options, at the top of a schema

_UNENFORCED = (
    "uniqueItems",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "propertyNames",
    "unevaluatedProperties",
    "unevaluatedItems",
    "$dynamicRef",
)
_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # of parts of a schema
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")
# Each of them says which properties an object has that others of them do not know.
_PLACES = ("properties", "$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "if", "then", "else", "dependentSchemas")
_OPEN = ("additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties")


def not_enforced(schema: Any) -> list[str]:
    """The keywords of a schema that a grammar does not enforce, each once; "oneOf" if more than one part may fit."""
    found: dict[str, None] = {}
    for part in _parts(schema):
        for keyword in _UNENFORCED:
            if part.get(keyword) not in (None, False):
                found[keyword] = None
        if isinstance(part.get("format"), str) and part["format"] not in _FORMATS:
            found["format"] = None
        if isinstance(part.get("oneOf"), list) and not _are_disjoint(part["oneOf"], schema):
            found["oneOf"] = None
    return list(found)


def enforceable(schema: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The schema with the options by which the library takes it, and these options of its own."""
    if not_enforced(schema) or any(keyword in part for part in _parts(schema) for keyword in _UNENFORCED):
        options["lenient"] = True
    elif any("oneOf" in part for part in _parts(schema)):
        options["coerce_one_of"] = True  # it is the same: at most one part fits, which the library may not see
    given = schema.get(OPTIONS)
    options |= given if isinstance(given, dict) else {}
    return closed(schema) | {OPTIONS: options} if options else closed(schema)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema in which objects that list their properties and say nothing of others have no others.

    A model without a list to end would go on to make up properties. What fits this schema fits the given one. That
    stays as it is if it describes one object in several places, as with `allOf` or with `properties` beside `anyOf`,
    where each would forbid what the others list.
    """
    return schema if any(_is_combined(part) for part in _parts(schema)) else _closed(schema)


def _is_combined(part: dict[str, Any]) -> bool:
    conjuncts = part.get("allOf")
    more = len(conjuncts) - 1 if isinstance(conjuncts, list) and conjuncts else 0
    return sum(name in part for name in _PLACES) + more > 1


def _closed(part: Any) -> Any:
    if isinstance(part, list):
        return [_closed(each) for each in part]
    if not isinstance(part, dict):
        return part
    made = dict(part)
    for name in _MAPS:
        if isinstance(part.get(name), dict):
            made[name] = {key: _closed(value) for key, value in part[name].items()}
    for name in {*_LISTS, *_SINGLE} & part.keys():
        made[name] = _closed(part[name])
    properties, is_open = part.get("properties"), any(name in part for name in _OPEN)
    if isinstance(properties, dict) and not is_open and _names(part.get("required")) <= properties.keys():
        made["additionalProperties"] = False
    return made


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema, and the schemas in it, as far as they are enforced."""
    parts = deque([schema])
    while parts:
        part = parts.popleft()
        if not isinstance(part, dict):
            continue
        yield part
        for name in _MAPS:
            if isinstance(part.get(name), dict):
                parts += part[name].values()
        for name in _LISTS:
            if isinstance(part.get(name), list):
                parts += part[name]
        parts += [part[name] for name in _SINGLE if isinstance(part.get(name), dict)]


def _are_disjoint(choices: list[Any], schema: Any) -> bool:
    """Whether at most one choice fits: they differ in type, in a constant, or in one that each of them requires."""
    resolved = [_resolved(choice, schema) for choice in choices]
    if not all(isinstance(choice, dict) for choice in resolved):
        return len(choices) < 2
    types = [choice.get("type") for choice in resolved]
    if _are_distinct(types) and not {"integer", "number"} <= set(types):
        return True
    if _are_distinct([_constant(choice) for choice in resolved]):
        return True
    required = [_names(choice.get("required")) for choice in resolved]
    shared = set.intersection(*required) if required else set()
    return any(_are_distinct([_constant(_property(choice, name)) for choice in resolved]) for name in shared)


def _names(value: Any) -> set[str]:
    return {name for name in value if isinstance(name, str)} if isinstance(value, list) else set()


def _property(choice: dict[str, Any], name: str) -> Any:
    properties = choice.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


def _constant(part: Any) -> Any:
    """The one scalar that a part of a schema allows; None if it allows more."""
    if not isinstance(part, dict):
        return None
    values = [part["const"]] if "const" in part else part.get("enum")
    return values[0] if isinstance(values, list) and len(values) == 1 else None


def _are_distinct(values: list[Any]) -> bool:
    return all(isinstance(value, str | int) for value in values) and len(set(values)) == len(values)


def _resolved(part: Any, schema: Any) -> Any:
    """What a part means that is nothing but a reference within the schema."""
    reference = part.get("$ref") if isinstance(part, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#"):
        return part
    place = schema
    for step in reference.split("/")[1:]:
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, dict) else None
    return place

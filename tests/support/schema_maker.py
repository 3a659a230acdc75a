"""Random JSON schemas of growing complexity, all of which have a valid instance."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
PATTERNS = ["^[a-z]{2,6}$", "^[A-Z][a-z]+( [A-Z]\\.)?$", "^(red|green|blue)-[0-9]{1,3}$", "^x?y{2}z*$"]
FORMATS = ["date", "ipv4", "uuid", "email"]


def make_schema(seed: int) -> Schema:
    """Schema number `seed`: an object, deeper and wider the higher the number."""
    rng = random.Random(seed)
    depth = 1 + seed // 50
    schema = _object(rng, depth, width=1 + seed // 40)
    if seed % 3 == 0:
        schema["$defs"] = {"leaf": _leaf(rng), "pair": _object(rng, 1, 2)}
        schema["properties"]["by_ref"] = {"$ref": rng.choice(["#/$defs/leaf", "#/$defs/pair"])}
        schema["required"] = [*schema.get("required", []), "by_ref"]
    return schema


def _any(rng: random.Random, depth: int) -> Schema:
    if depth <= 0:
        return _leaf(rng)
    make = rng.choice([_leaf, _object, _array, _choice])
    return make(rng) if make is _leaf else make(rng, depth)


def _object(rng: random.Random, depth: int, width: int = 2) -> Schema:
    names = [f"{rng.choice(['key', 'Name', 'wert_', 'a b', 'é'])}{i}" for i in range(rng.randint(1, width))]
    schema: Schema = {"type": "object", "properties": {name: _any(rng, depth - 1) for name in names}}
    schema["additionalProperties"] = False
    required = [name for name in names if rng.random() < 0.7]
    return schema | ({"required": required} if required else {})


def _array(rng: random.Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _choice(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _leaf(rng: random.Random) -> Schema:
    low = rng.randint(-500, 500)
    text: Schema = {"type": "string", "minLength": rng.randint(0, 3), "maxLength": rng.randint(3, 12)}
    leaves: list[Schema] = [
        {"enum": rng.sample(["a", "bc", "Ünï", 'say "so"', 7, -1.5, None, True, "x\ny", ""], rng.randint(1, 6))},
        {"const": rng.choice(["only", 3, {"k": [1, 2]}])},
        {"type": "integer", "minimum": low, "maximum": low + rng.choice([0, 9, 1000])},
        {"type": "number", "exclusiveMinimum": low, "maximum": low + 2.5},
        {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 20},
        {"type": "string", "format": rng.choice(FORMATS)},
        {"type": ["boolean", "null"]},
        text,
    ]
    return rng.choice(leaves)

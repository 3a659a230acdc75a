"""What of a JSON schema a grammar does not enforce."""

import pytest

from rayllm.text.json_schema import closed, enforceable, not_enforced

KINDS = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}
PETS = {
    "$defs": {
        "cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
        "dog": {"type": "object", "properties": {"kind": {"enum": ["dog"]}}, "required": ["kind"]},
    }
}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({}, []),
        ({"type": "object", "properties": {"not": {"type": "string"}, "if": {}}}, []),
        ({"const": {"not": {}}, "enum": [{"uniqueItems": True}], "default": {"not": 1}, "examples": [{"if": 1}]}, []),
        ({"type": "array", "uniqueItems": True}, ["uniqueItems"]),
        ({"type": "array", "uniqueItems": False}, []),
        ({"not": {"uniqueItems": True}}, ["not"]),
        ({"if": {}, "then": {}, "else": {"minLength": 3}}, ["if", "then", "else"]),
        (
            {"properties": {"a": {"items": {"uniqueItems": True}}, "b": {"not": {"type": "null"}}}},
            ["not", "uniqueItems"],
        ),
        (
            {"$defs": {"a": {"propertyNames": {"pattern": "a"}}}, "anyOf": [{"contains": {}}]},
            ["contains", "propertyNames"],
        ),
        ({"items": [{"dependentRequired": {"a": ["b"]}}], "prefixItems": [{"not": {}}]}, ["dependentRequired", "not"]),
        ({"additionalProperties": {"unevaluatedProperties": {}}}, ["unevaluatedProperties"]),
        ({"type": "string", "format": "date"}, []),
        ({"type": "string", "format": "idn-email"}, ["format"]),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, []),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ["oneOf"]),
        ({"oneOf": [{"const": "a"}, {"const": "b"}]}, []),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, ["oneOf"]),
        ({"oneOf": [True, {"type": "string"}]}, ["oneOf"]),
        ({"oneOf": []}, []),
        (PETS | KINDS, []),
        (PETS | {"oneOf": [KINDS["oneOf"][0]] * 2}, ["oneOf"]),
        ({"properties": 3, "anyOf": 3, "items": 3, "oneOf": 3, "format": 3, "$defs": [1]}, []),
    ],
)
def test_keywords_that_are_not_enforced(schema, found):
    assert sorted(not_enforced(schema)) == sorted(found)


def test_the_library_is_lenient_only_where_it_must_be():
    assert enforceable({"type": "string"}) == {"type": "string"}
    assert enforceable({"uniqueItems": False})["x-guidance"] == {"lenient": True}
    assert enforceable(PETS | KINDS)["x-guidance"] == {"coerce_one_of": True}
    own = {"not": {}, "x-guidance": {"whitespace_flexible": True}}
    compact = enforceable(own, whitespace_flexible=False, key_separator=":")
    assert compact["x-guidance"] == {"lenient": True, "whitespace_flexible": True, "key_separator": ":"}
    assert own == {"not": {}, "x-guidance": {"whitespace_flexible": True}}


A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}
NO_MORE = {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "made"),
    [
        (A, A | NO_MORE),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}} | NO_MORE),
        (
            {"properties": {"a": {"items": A}, "b": {"anyOf": [B, {"type": "null"}]}}, "required": ["a"]},
            {"properties": {"a": {"items": A | NO_MORE}, "b": {"anyOf": [B | NO_MORE, {"type": "null"}]}}}
            | {"required": ["a"]}
            | NO_MORE,
        ),
        (
            {"$defs": {"x": A}, "allOf": [{"$ref": "#/$defs/x"}]},
            {"$defs": {"x": A | NO_MORE}, "allOf": [{"$ref": "#/$defs/x"}]},
        ),
        ({"prefixItems": [A], "items": [B]}, {"prefixItems": [A | NO_MORE], "items": [B | NO_MORE]}),
    ],
)
def test_objects_have_the_properties_that_they_list(schema, made):
    assert closed(schema) == made
    assert closed(made) == made
    assert enforceable(schema) == made


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        A | {"additionalProperties": True},
        A | {"patternProperties": {"^x": {}}},
        A | {"unevaluatedProperties": False},
        A | {"minProperties": 2},
        A | {"required": ["a", "b"]},
        # An object that is described in several places: each would forbid what the others list.
        {"allOf": [A, B]},
        A | {"anyOf": [B, {}]},
        A | {"$ref": "#/$defs/x", "$defs": {"x": B}},
        A | {"if": A, "then": B},
        {"items": {"allOf": [A]} | B, "$defs": {"x": B}},
        # What is no schema is left to the library to refuse.
        {"properties": 3, "required": "a", "allOf": 3, "$defs": [A]},
    ],
)
def test_what_may_have_more_stays_as_it_is(schema):
    assert closed(schema) == schema

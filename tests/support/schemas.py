"""JSON schemas that an engine would not hold an answer to, and some that it does."""

from typing import Any

_AB: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
_S = {"$defs": {"S": {"type": "string"}}}
BROKEN: list[tuple[dict[str, Any], str, Any]] = [
    (_AB | {"required": ["c"]}, "required", {"a": 1}),
    ({"type": "object", "required": ["a"]}, "required", {}),
    (_AB | {"dependentRequired": {"a": ["b"]}}, "dependentRequired", {"a": 1}),
    (_AB | {"dependentSchemas": {"a": {"type": "object"}}}, "dependentSchemas", None),
    (_AB | {"dependencies": {"a": ["b"]}}, "dependencies", {"a": 1}),
    (_AB | {"if": {"type": "object"}, "then": {"type": "null"}}, "if", {"a": 1}),
    (_AB | {"anyOf": [{"type": "null"}]}, "properties", None),
    ({"type": "string", "not": {"enum": ["a"]}}, "not", "a"),
    (_S | {"$ref": "#/$defs/S", "maxLength": 3}, "maxLength", "abcd"),
    ({"pattern": "^[a-z]+$", "maxLength": 3}, "maxLength", 1.5e300),
    ({"pattern": "^[a-z]+$"}, "pattern", "A"),
    ({"minimum": 5}, "minimum", 3),
    ({"required": ["a"]}, "required", {}),
    ({"minItems": 1}, "minItems", []),
    ({"patternProperties": {"^x": {"type": "integer"}}}, "patternProperties", {"xa": "s"}),
    ({"type": "string", "format": "date", "maxLength": 2}, "maxLength", "2020-01-01"),
    ({"type": "string", "format": "banana"}, "format", None),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems", [1, 1]),
    ({"type": "array", "contains": {"type": "integer"}}, "contains", None),
    ({"type": "integer", "multipleOf": 3}, "multipleOf", None),
    ({"type": "integer", "enum": ["a", 1]}, "enum", "a"),
    ({"type": "integer", "const": "a"}, "const", "a"),
    ({"type": "string", "enum": ["aaa", "b"], "maxLength": 1}, "maxLength", "aaa"),
    ({"type": "integer", "anyOf": [{"type": "integer"}, {"type": "null"}]}, "type", None),
    ({"type": "string", "oneOf": [{"type": "integer"}, {"type": "string"}]}, "type", 1),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, "oneOf", 5),
    ({"type": "string", "allOf": [{"type": "string", "maxLength": 2}, {"type": "string"}]}, "allOf", None),
    ({"type": "object", "propertyNames": {"pattern": "^x", "maxLength": 3}}, "propertyNames.maxLength", None),
    (_AB | {"propertyNames": {"pattern": "^x"}}, "propertyNames", None),
    ({"type": "object", "patternProperties": {"^x": {}}, "properties": {"y": {}}}, "patternProperties", None),
]
"""Schemas, the keyword at fault, and a document that breaks it and that an engine would give (None: another cause)."""

KEPT: list[dict[str, Any]] = [
    {"type": "string", "enum": ["a", "b"], "default": "a", "title": "T", "description": "D"},
    {"type": "number", "enum": [1, 2.5]},
    _S | {"type": "string", "$ref": "#/$defs/S", "description": "D"},
    {"type": ["string", "null"], "anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    {"allOf": [{"type": "object"}], "description": "pydantic's way to describe a reference"},
    {"oneOf": [{"type": "string"}, {"type": "integer"}, {"const": None}]},
    {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b")
        ],
        "discriminator": {"propertyName": "kind"},
    },
    {"type": "object", "propertyNames": {"pattern": "^x"}},
    {"type": "string", "format": "date"},
    {"type": "integer", "format": "int32", "minimum": 0},
    {"type": "array", "items": {"type": "string"}, "uniqueItems": False},
    _AB | {"required": ["a", "b"], "minProperties": 1},
    {"properties": {"a": {}}, "required": ["a"]},
]

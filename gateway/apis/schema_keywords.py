"""Which keywords of a JSON schema an answer is held to, and which would be passed over without a word.

xgrammar (0.2) decides by one keyword of a schema: ``$ref``, else ``const``, ``enum``, ``anyOf``, ``oneOf``, ``allOf``,
else the type. What stands beside that is not looked at. So it is refused here by name: the caller would get JSON that
breaks its schema, with 200. ``tests/conformance/test_schema_keywords.py`` asks xgrammar itself.
"""

from collections.abc import Callable
from typing import Any

from gateway.apis.fields import refuse

_NEVER_KEPT = frozenset(
    """
    not if then else dependentRequired dependentSchemas dependencies contains minContains maxContains uniqueItems
    multipleOf additionalItems $dynamicRef $recursiveRef divisibleBy disallow extends
    """.split()  # noqa: SIM905
)
_STRING = frozenset(("minLength", "maxLength", "pattern", "format"))
_NUMBER = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
_ARRAY = frozenset(("items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"))
_OBJECT = frozenset(
    """
    properties required additionalProperties patternProperties propertyNames minProperties maxProperties
    unevaluatedProperties
    """.split()  # noqa: SIM905
)
_DECIDING = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_CONSTRAINTS = _STRING | _NUMBER | _ARRAY | _OBJECT | frozenset(_DECIDING)
_INFERRED = {
    "object": ("properties", "additionalProperties", "unevaluatedProperties"),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}
FORMATS = frozenset(
    """
    email date time date-time duration ipv4 ipv6 hostname uuid uri uri-reference uri-template json-pointer
    relative-json-pointer
    """.split()  # noqa: SIM905
)
"""Of texts; others are refused by vLLM, in general words."""

Resolve = Callable[[str], Any]
"""From ``#/...`` to the schema that it means."""


def check_kept(at: str, node: dict[str, Any], resolve: Resolve, *, names: bool = False) -> None:
    """Raises HeadraceError that names the keyword of ``node`` which an answer would not be held to.

    ``names``: the schema is of names of properties, so of texts.
    """
    for name in sorted(_NEVER_KEPT & node.keys()):
        if node[name] not in (False, [], {}) or name == "not":
            refuse(f"{at}.{name}", f"'{name}' cannot be held to by the engine: leave it out.")
    deciding = next((name for name in _DECIDING if name in node), None)
    if deciding is not None:
        _check_beside(at, node, deciding, resolve)
    else:
        _check_typed(at, node, {"string"} if names else _types(node))


def _check_beside(at: str, node: dict[str, Any], deciding: str, resolve: Resolve) -> None:
    beside = (_CONSTRAINTS & node.keys()) - {deciding}
    for name in sorted(beside):
        refuse(
            f"{at}.{name}", f"The engine does not look at '{name}' beside '{deciding}': put it into the schemas there."
        )
    if deciding == "allOf" and len(node["allOf"]) > 1:
        refuse(f"{at}.allOf", "More than one schema in 'allOf' cannot be held to by the engine: make them one.")
    if deciding == "oneOf" and not _exclusive(node["oneOf"], resolve):
        refuse(f"{at}.oneOf", "That only one of these matches cannot be held to by the engine: 'anyOf' can.")
    wanted = _stated(node)
    found = _known_types(node, resolve) if wanted else set()
    if wanted and (found is None or not found <= _widened(wanted)):
        name = deciding if deciding in ("const", "enum") else "type"
        refuse(f"{at}.{name}", f"The engine does not look at 'type' beside '{deciding}', and here they differ.")


def _check_typed(at: str, node: dict[str, Any], types: set[str]) -> None:
    if not types and (loose := sorted(_CONSTRAINTS & node.keys())):
        refuse(f"{at}.{loose[0]}", f"'{loose[0]}' is not looked at without a 'type'.")
    if "string" in types:
        shaped = next((name for name in ("pattern", "format") if name in node), None)
        sized = next((name for name in ("minLength", "maxLength") if name in node), None)
        if shaped and sized:
            refuse(f"{at}.{sized}", f"'{sized}' beside '{shaped}' cannot be held to by the engine.")
        if "format" in node and node["format"] not in FORMATS:
            refuse(f"{at}.format", f"The engine knows these formats: {', '.join(sorted(FORMATS))}.")
    if "object" in types:
        properties, patterns = node.get("properties") or {}, node.get("patternProperties") or {}
        if undeclared := [name for name in node.get("required", ()) if name not in properties]:
            refuse(f"{at}.required", f"{undeclared[0][:64]!r} is not among 'properties', and would not be required.")
        if patterns and (properties or len(patterns) > 1):
            refuse(f"{at}.patternProperties", "The engine takes one pattern, and none beside 'properties'.")
        if "propertyNames" in node and (properties or patterns or node.get("unevaluatedProperties", True) is not True):
            refuse(f"{at}.propertyNames", "The engine does not look at 'propertyNames' beside other properties.")


def _types(node: dict[str, Any]) -> set[str]:
    """As the engine sees them: stated, or by what there is; empty for anything."""
    if stated := _stated(node):
        return stated
    return next(({kind} for kind, names in _INFERRED.items() if any(name in node for name in names)), set())


def _stated(node: dict[str, Any]) -> set[str]:
    kinds = node.get("type", [])
    return {kinds} if isinstance(kinds, str) else set(kinds)


def _widened(types: set[str]) -> set[str]:
    return types | {"integer"} if "number" in types else types


def _type_of(value: Any) -> str:
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    kinds = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds[type(value)]


def _known_types(node: Any, resolve: Resolve, depth: int = 16) -> set[str] | None:
    """The types that match ``node``, by what decides it; None where that is open."""
    if not isinstance(node, dict) or depth == 0:
        return None
    if "$ref" in node:
        return _known_types(resolve(node["$ref"]), resolve, depth - 1)
    if "const" in node:
        return {_type_of(node["const"])}
    if "enum" in node:
        return set(map(_type_of, node["enum"]))
    for name in ("anyOf", "oneOf", "allOf"):
        if isinstance(branches := node.get(name), list):
            every = [_known_types(branch, resolve, depth - 1) for branch in branches]
            return None if None in every else set().union(*filter(None, every))
    return _types(node) or None


def _exclusive(branches: Any, resolve: Resolve) -> bool:
    """Whether no two match the same value, by their types or by a property that tells them apart."""
    if not isinstance(branches, list):
        return True  # Refused elsewhere.
    for index, one in enumerate(branches):
        for other in branches[index + 1 :]:
            kinds, others = _known_types(one, resolve), _known_types(other, resolve)
            if kinds is None or others is None:
                return False
            if _widened(kinds) & _widened(others) and not _told_apart(one, other, resolve):
                return False
    return True


def _told_apart(one: Any, other: Any, resolve: Resolve) -> bool:
    one, other = _resolved(one, resolve), _resolved(other, resolve)
    if (values := _values(one)) and (others := _values(other)):
        return not any(value in others for value in values)
    for name in set(one.get("required", ())) & set(other.get("required", ())):
        values = _values(_resolved(one.get("properties", {}).get(name), resolve))
        others = _values(_resolved(other.get("properties", {}).get(name), resolve))
        if values and others and not any(value in others for value in values):
            return True
    return False


def _values(node: dict[str, Any]) -> list[Any]:
    return [node["const"]] if "const" in node else list(node.get("enum", ()))


def _resolved(node: Any, resolve: Resolve) -> dict[str, Any]:
    for _ in range(16):
        if not isinstance(node, dict) or "$ref" not in node:
            break
        node = resolve(node["$ref"])
    return node if isinstance(node, dict) else {}

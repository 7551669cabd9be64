"""What may constrain an answer: JSON schemas (those of tools, too), patterns, grammars, structural tags and choices.

An engine compiles them before the first token, and the time grows steeply with some of their parts: 1,000 optional
properties take 16 s, 25 counted repetitions in 458 characters 13 s (measured with xgrammar). One budget for all kinds
refuses here what is surely too much, by name and for nothing; OpenAI's own bounds are alike. What is left a worker
compiles in a process with bounds on time and memory before any engine sees it: that is what holds. Whether a pattern or
a grammar is well-formed is told there, too, with 400 and before the first token.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.apis.fields import Text, refuse
from gateway.apis.schema_keywords import check_kept

PROPERTIES_MAX = 1000
OPTIONAL_MAX = 200
"""Properties of one object that are not required: the time grows with their cube."""
VALUES_MAX = 1000
"""Values of all ``enum``, and choices."""
CHARS_MAX = 120_000
"""Of names and values in all schemas of a request; of choices; as OpenAI has it."""
PATTERN_CHARS_MAX = 1024
"""Of one pattern. With ``([a-z]*[0-9]*|b.*)*`` 400 times over an engine found no end."""
PATTERNS_CHARS_MAX = 8192
"""Of all patterns of a request."""
GRAMMAR_CHARS_MAX = 32_768
REPEATS_MAX = 1_000_000
"""Largest bound on a length or a number of items: far beyond any context."""
REPETITIONS_MAX = 16
"""Different long repetitions in lengths, numbers of items and patterns: each costs up to two seconds of CPU (measured;
the same one again costs nothing)."""
LONG = 32
"""Times from which a repetition counts; ten times take .07 s, a hundred 1 s."""


_STEP = re.compile(r"\\.|\"(?:[^\"\\]|\\.)*\"|\[(?:[^\]\\]|\\.)*\]|\{\d*,?\d*\}|[()]", re.ASCII | re.DOTALL)
"""Of a pattern or grammar: what stands for itself (to be passed over), a counted repetition, or a bracket."""


def _times(counted: str) -> int:
    """The larger number of ``{2}``, ``{2,}`` or ``{2,5}``; 0 for what is none."""
    numbers = [int(number[:9]) for number in counted.strip("{}").split(",") if number]
    return max(numbers, default=0)


class ComplexityLimit:
    """What the constraints of one request have taken so far."""

    def __init__(self) -> None:
        self._left = {
            "properties": PROPERTIES_MAX,
            "values in 'enum'": VALUES_MAX,
            "characters in names and values": CHARS_MAX,
            "characters in patterns": PATTERNS_CHARS_MAX,
        }
        self._repetitions: set[object] = set()

    def take(self, where: str, what: str, count: int) -> None:
        """``what`` is a key of those left; raises HeadraceError that names the place ``where``, as the others do."""
        self._left[what] -= count
        if self._left[what] < 0:
            refuse(where, f"This is too large to constrain an answer by: too many {what} in all.")

    def pattern(self, where: str, text: object) -> None:
        """Count a regular expression; also refuses what is none, or too long."""
        if not isinstance(text, str) or "\0" in text or len(text) > PATTERN_CHARS_MAX:
            refuse(where, f"A pattern is text of at most {PATTERN_CHARS_MAX} characters, none of them NUL.")
        self.take(where, "characters in patterns", len(text))
        self.repetitions(where, text)

    def repetitions(self, where: str, text: str) -> None:
        """Count the repetitions in a pattern or a grammar; also refuses those that multiply beyond REPEATS_MAX."""
        inside: list[int] = [1]
        """The most times that something is repeated in each open bracket."""
        last = 1
        """The same of the bracket that was closed just before."""
        for step in _STEP.finditer(text):
            found = step.group()
            if found == "(":
                inside.append(1)
            elif found == ")" and len(inside) > 1:
                last = inside.pop()
                inside[-1] = max(inside[-1], last)
            elif found[0] == "{" and (times := _times(found)) > 1:
                if times >= LONG:
                    self.repetition(where, (text, step.start()))
                group = last if text[step.start() - 1] == ")" else 1
                inside[-1] = max(inside[-1], group * times)
                if inside[-1] > REPEATS_MAX:
                    refuse(where, f"Repetitions in each other make more than {REPEATS_MAX} here.")

    def repetition(self, where: str, kind: object) -> None:
        """Count a long repetition; the same ``kind`` once more is free."""
        self._repetitions.add(kind)
        if len(self._repetitions) > REPETITIONS_MAX:
            refuse(where, f"More than {REPETITIONS_MAX} different repetitions of {LONG} times or more.")


class StructuredOutputs(msgspec.Struct):
    """vLLM's own field."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=VALUES_MAX)] | None = None
    grammar: Annotated[str, Meta(min_length=1, max_length=GRAMMAR_CHARS_MAX)] | None = None
    json_object: bool | None = None
    structural_tag: Annotated[str, Meta(max_length=GRAMMAR_CHARS_MAX)] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def check(self, where: str, complexity: ComplexityLimit) -> None:
        """Raises HeadraceError that names the place at fault."""
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        if sum(getattr(self, name) is not None for name in kinds) != 1:
            refuse(where, f"Give exactly one of {', '.join(kinds)}.")
        if self.json is not None:
            schema = _decoded(f"{where}.json", self.json) if isinstance(self.json, str) else self.json
            check_schema(f"{where}.json", schema, complexity)
        if self.regex is not None:
            complexity.pattern(f"{where}.regex", self.regex)
        if self.whitespace_pattern is not None:
            complexity.pattern(f"{where}.whitespace_pattern", self.whitespace_pattern)
        if self.choice is not None:
            complexity.take(f"{where}.choice", "characters in names and values", sum(map(len, self.choice)))
        if self.grammar is not None:
            complexity.repetitions(f"{where}.grammar", self.grammar)
        if self.structural_tag is not None:
            _check_tag(f"{where}.structural_tag", _decoded(f"{where}.structural_tag", self.structural_tag), complexity)


class JsonSchema(msgspec.Struct):
    """The chat's ``json_schema``."""

    name: Text
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormatParam(msgspec.Struct):
    """The chat's ``response_format``; ``structural_tag`` is vLLM's."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[str] | None = None

    def check(self, where: str, complexity: ComplexityLimit) -> None:
        """Raises HeadraceError that names the place at fault."""
        if self.type == "json_schema":
            if self.json_schema is None or self.json_schema.schema is None:
                refuse(f"{where}.json_schema", "The type 'json_schema' needs a 'json_schema' with 'name' and 'schema'.")
            check_schema(f"{where}.json_schema.schema", self.json_schema.schema, complexity)
        elif self.type == "structural_tag":
            if self.format is None and (self.structures is None or self.triggers is None):
                refuse(where, "The type 'structural_tag' needs a 'format', or 'structures' and 'triggers'.")
            if len(msgspec.json.encode([self.format, self.structures, self.triggers])) > GRAMMAR_CHARS_MAX:
                refuse(where, f"A structural tag has at most {GRAMMAR_CHARS_MAX} characters.")
            _check_tag(where, [self.format, self.structures], complexity)


def _decoded(where: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        refuse(where, "This is not JSON.")


def _check_tag(where: str, tag: Any, complexity: ComplexityLimit) -> None:
    """The schemas and patterns that stand anywhere in a structural tag."""
    waiting = [tag]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            for name, value in node.items():
                if name in ("schema", "json_schema"):
                    check_schema(f"{where}.{name}", value, complexity)
                elif name == "pattern":
                    complexity.pattern(f"{where}.{name}", value)
                elif name == "grammar" and isinstance(value, str):
                    complexity.repetitions(f"{where}.{name}", value)
                else:
                    waiting.append(value)
        elif isinstance(node, list):
            waiting += node


def check_tools(
    where: str,
    tools: Sequence[tuple[str, dict[str, Any] | None, bool | None]],
    mode: str | None,
    named: str | None,
    complexity: ComplexityLimit,
) -> None:
    """``tools``: name, schema, strictness; ``where`` is the schema's place, with ``{}`` for the tool's number.

    The choice among them is a ``mode``, or the name of a function.

    Bounds count where something is compiled: a call that must be made obeys its schema, one that the model may make
    does where the tool is strict. 300 optional properties cost 6 s before the first token (measured).
    """
    if named is not None:
        if named not in [name for name, _, _ in tools]:
            refuse("tool_choice", "'tool_choice' names a function that is not among 'tools'.")
    elif not tools and mode not in (None, "none", "auto"):
        refuse("tool_choice", "'tool_choice' needs 'tools'.")
    forced = named is not None or mode in ("required", "any")
    for number, (name, schema, strict) in enumerate(tools if mode != "none" else ()):
        if named in (None, name) and (forced or strict):
            check_schema(where.format(number), schema or {}, complexity)


_TYPES = {"string", "number", "integer", "boolean", "null", "array", "object"}
_SCHEMA = ("additionalProperties", "unevaluatedProperties", "propertyNames", "unevaluatedItems", "contains", "not")
_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_REPEATS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))


def check_schema(where: str, schema: Any, complexity: ComplexityLimit) -> None:
    """Raises HeadraceError that names the place in ``schema`` which is no JSON schema, or is too large to compile."""
    kept: list[tuple[str, dict[str, Any], bool]] = []
    waiting = [(where, schema)]
    while waiting:
        at, node = waiting.pop()
        if isinstance(node, bool) and at != where:
            continue
        if not isinstance(node, dict):
            refuse(at, "A schema is an object.")
        _check_keywords(at, node, complexity)
        if (reference := node.get("$ref")) is not None and not _resolves(reference, schema):
            refuse(f"{at}.$ref", "This refers to nothing inside the schema ('#', or '#/$defs/...').")
        kept.append((at, node, at.endswith(".propertyNames")))
        for name in _SCHEMA:
            if name in node:
                waiting.append((f"{at}.{name}", node[name]))
        for name in (*_SCHEMAS, "items"):
            if isinstance(parts := node.get(name), list):
                waiting += [(f"{at}.{name}[{index}]", part) for index, part in enumerate(parts)]
            elif name == "items" and parts is not None:
                waiting.append((f"{at}.items", parts))
            elif parts is not None:
                refuse(f"{at}.{name}", "This is a list of schemas.")
        for name in _NAMED:
            if (named := node.get(name)) is not None:
                if not isinstance(named, dict):
                    refuse(f"{at}.{name}", "This is an object of schemas by name.")
                complexity.take(f"{at}.{name}", "characters in names and values", sum(map(len, named)))
                waiting += [(f"{at}.{name}.{key[:64]}", value) for key, value in named.items()]
    for at, node, names in kept:  # By now every part is well-formed, and every reference leads somewhere.
        check_kept(at, node, lambda reference: _resolved(reference, schema), names=names)


def _check_keywords(at: str, node: dict[str, Any], complexity: ComplexityLimit) -> None:
    """What is no schema in itself."""
    if (kinds := node.get("type")) is not None:
        for kind in kinds if isinstance(kinds, list) and kinds else [kinds]:
            if not isinstance(kind, str) or kind not in _TYPES:
                refuse(f"{at}.type", f"A type is one of {', '.join(sorted(_TYPES))}, or a list of them.")
    if (values := node.get("enum")) is not None:
        if not isinstance(values, list) or not values:
            refuse(f"{at}.enum", "This is a list with at least one value.")
        complexity.take(f"{at}.enum", "values in 'enum'", len(values))
        complexity.take(f"{at}.enum", "characters in names and values", len(msgspec.json.encode(values)))
    if "const" in node:
        complexity.take(f"{at}.const", "characters in names and values", len(msgspec.json.encode(node["const"])))
    required = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        refuse(f"{at}.required", "This is a list of names.")
    if isinstance(properties := node.get("properties"), dict):
        complexity.take(f"{at}.properties", "properties", len(properties))
        if len(properties.keys() - set(required)) > OPTIONAL_MAX:
            refuse(f"{at}.properties", f"At most {OPTIONAL_MAX} properties of an object may be optional.")
    if "pattern" in node:
        complexity.pattern(f"{at}.pattern", node["pattern"])
    if isinstance(named := node.get("patternProperties"), dict):
        for pattern in named:
            complexity.pattern(f"{at}.patternProperties", pattern)
    for names in _REPEATS:
        for name in names:
            if (bound := node.get(name)) is not None and not (_is_whole(bound) and 0 <= bound <= REPEATS_MAX):
                refuse(f"{at}.{name}", f"This is a whole number from 0 to {REPEATS_MAX}.")
        bounds = tuple(node.get(name) or 0 for name in names)
        if max(bounds) >= LONG:
            complexity.repetition(f"{at}.{names[bounds[1] >= LONG]}", (names, bounds))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _resolves(reference: object, schema: Any) -> bool:
    return _resolved(reference, schema) is not None


def _resolved(reference: object, schema: Any) -> Any:
    """What a reference leads to; None for nothing."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    node = schema
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and name.isascii() and int(name[:9]) < len(node):
            node = node[int(name[:9])]
        else:
            return None
    return node

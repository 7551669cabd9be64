"""What the checks of all APIs share: types with their bounds, and refusals that name the field at fault."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, NoReturn, Protocol, TypeVar

import msgspec
from msgspec import Meta

from contracts import whole_numbers
from contracts.errors import HeadraceError

INT_MAX = 2**31 - 1
VOCABULARY_MAX = 1 << 20
"""Bound of token ids for models whose tokenizer is not known here."""

Positive = Annotated[int, Meta(ge=1, le=INT_MAX)]
Text = Annotated[str, Meta(min_length=1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=INT_MAX)]

T = TypeVar("T")


def present(body: dict[str, Any]) -> dict[str, Any]:
    """The body without nulls and empty options; nulls inside messages are left out, too."""
    fields = {name: value for name, value in body.items() if value is not None}
    for name in ("tools", "stop", "logit_bias", "stop_token_ids", "bad_words"):
        if name in fields and fields[name] in ([], {}):
            del fields[name]
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = [
            {name: value for name, value in message.items() if value is not None}
            if isinstance(message, dict) and None in message.values()
            else message
            for message in messages
        ]
    return fields


def leave_out(fields: dict[str, Any], name: str, unwanted: Callable[[Any], bool]) -> None:
    """Take out of the list ``name`` the objects of a type that is ``unwanted``; an empty one goes, too.

    Coding agents declare in every request what only their vendor's own servers run. A caller that forces one of those
    finds out by its ``tool_choice``.
    """
    if isinstance(given := fields.get(name), list):
        fields[name] = [item for item in given if not (isinstance(item, dict) and unwanted(item.get("type")))]
        if given and not fields[name]:
            del fields[name]


def model_of(body: dict[str, Any]) -> str:
    """The name of the model asked for; raises HeadraceError."""
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise HeadraceError("invalid_request", "Name the model to use, as text.", param="model")
    return model


def travelling(body: msgspec.Struct, left_out: Collection[str] = ()) -> dict[str, Any]:
    """What of a checked body goes to the engine: made anew from its structs, so that nothing that they do not name
    travels at any depth. A null is as if absent; objects that are data (schemas, arguments) stay as they are.
    """
    fields = zip(body.__struct_fields__, msgspec.structs.astuple(body), strict=True)
    return {name: _plain(value) for name, value in fields if value is not None and name not in left_out}


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return travelling(value)
    if type(value) is list and value and isinstance(value[0], msgspec.Struct):
        return [travelling(item) for item in value]
    return value


def refuse(param: str, message: str) -> NoReturn:
    """Raises HeadraceError (invalid_request) about the field ``param``."""
    raise HeadraceError("invalid_request", f"{param}: {message}", param=param)


def refuse_fields(fields: dict[str, Any], reasons: Mapping[str, str]) -> None:
    """Refuse those of ``reasons`` that are set: to ignore them would change the answer."""
    for name, reason in reasons.items():
        if fields.get(name):
            refuse(name, reason)


_PATH = re.compile(r" - at `\$?(?P<path>[^`]*)`\Z")
_VALUE = re.compile(r"Invalid enum value (.*)", re.DOTALL)
_FIELD = re.compile(r"(missing required|unknown) field `(?P<field>[^`]+)`")


def converted(fields: dict[str, Any], kind: type[T]) -> T:
    """``fields`` as ``kind``; a value of the wrong type or out of range raises HeadraceError with its path."""
    try:
        return whole_numbers.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise invalid(error) from error


def invalid(error: msgspec.ValidationError) -> HeadraceError:
    """What msgspec found wrong, with the field's path as ``param``."""
    text = str(error)
    path = _PATH.search(text)
    steps = [path["path"].lstrip(".")] if path is not None and path["path"] else []
    if field := _FIELD.search(text):
        steps.append(field["field"])
    param = ".".join(steps).replace("[...]", "") or None
    reason = _PATH.sub("", text)
    if value := _VALUE.match(reason):
        part = param is not None and param.endswith("].type") and "content[" in param
        reason = f"{value[1]} is {'no part that is read here: send text' if part else 'none of its values'}"
    return HeadraceError("invalid_request", f"{param}: {reason}." if param else f"{reason}.", param=param)


GREEDY_BELOW = 1e-5
"""A temperature below this is nobody's but a caller's who means 0; engines divide by it, and overflow."""


class Samples(Protocol):
    """A body that says how to sample."""

    temperature: float | None
    top_p: float | None


def make_greedy(body: Samples) -> None:
    """What surely means the likeliest token says so in one way: a temperature of 0."""
    if body.top_p == 0 or (body.temperature is not None and body.temperature < GREEDY_BELOW):
        body.temperature, body.top_p = 0.0, None


def check_token_ids(where: str, ids: list[int] | None, vocabulary: int) -> None:
    """``vocabulary``: number of token ids that there are."""
    if ids and (min(ids) < 0 or max(ids) >= vocabulary):
        refuse(where, f"Token ids must be at least 0 and below {vocabulary}.")


def check_parts(where: str, content: Any) -> None:
    """Refuse a part of a message without its text; ``content`` may also be text, or absent."""
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if (part.refusal if part.type == "refusal" else part.text) is None:
            refuse(f"{where}[{number}]", f"A part of the type {part.type!r} needs its text.")


def whole_ids(prompt: str | list[Any]) -> str | list[Any]:
    """The prompt, its token ids as integers, however their numbers are written."""
    kinds = set(map(type, prompt)) if isinstance(prompt, list) else set()
    if float in kinds:
        return [whole_numbers.whole(item) for item in prompt]
    return [whole_ids(item) for item in prompt] if list in kinds else prompt


def count_prompts(where: str, prompt: str | list[Any], vocabulary: int) -> int:
    """Number of prompts; raises HeadraceError when they are neither texts nor token ids."""
    if isinstance(prompt, str):
        return 1
    kinds = set(map(type, prompt))
    if kinds == {int}:
        check_token_ids(where, prompt, vocabulary)
        return 1
    if kinds not in ({str}, {list}):
        refuse(where, "Expected text, a list of texts, a list of token ids, or a list of such lists.")
    for index, ids in enumerate(prompt):
        if isinstance(ids, list):
            if set(map(type, ids)) != {int}:
                refuse(f"{where}[{index}]", "Expected a list of token ids.")
            check_token_ids(f"{where}[{index}]", ids, vocabulary)
    return len(prompt)

"""What the checks of all endpoints share: types with their bounds, and refusals that name the field at fault."""

import re
from typing import Annotated, Any, NoReturn, TypeVar

import msgspec
from msgspec import Meta

from contracts.errors import HeadraceError

Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Text = Annotated[str, Meta(min_length=1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]

T = TypeVar("T")


class Valid(msgspec.Struct):
    """A body that may be served. ``fields`` is what travels, but for the output limit, which admission sets."""

    fields: dict[str, Any]
    stream: bool
    choices: int
    max_output_tokens: int | None
    """Per choice; None when the caller stated none."""
    least_output_tokens: int = 1
    """What the default must not go below: a scripted answer states its own length."""
    limit_field: str = "max_tokens"
    """Where the endpoint has its output limit; empty for one that generates nothing."""
    prompt_field: str = "messages"


def check_temperature(value: float | None) -> None:
    if isinstance(value, float) and 0 < value < 1e-5:
        refuse("temperature", "Use 0 for greedy sampling; a temperature below 0.00001 overflows.")


def travelling(fields: dict[str, Any], kind: type[msgspec.Struct], left_out: set[str]) -> dict[str, Any]:
    """Those of ``fields`` that ``kind`` names."""
    return {name: fields[name] for name in kind.__struct_fields__ if name in fields and name not in left_out}


_PATH = re.compile(r" - at `\$?(?P<path>[^`]*)`\Z")
_FIELD = re.compile(r"(missing required|unknown) field `(?P<field>[^`]+)`")


def converted(fields: dict[str, Any], kind: type[T]) -> T:
    """``fields`` as ``kind``; a value of the wrong type or out of range raises HeadraceError with its path."""
    try:
        return msgspec.convert(fields, kind)
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
    return HeadraceError("invalid_request", f"{param}: {reason}." if param else f"{reason}.", param=param)


def refuse(param: str, message: str) -> NoReturn:
    raise HeadraceError("invalid_request", f"{param}: {message}", param=param)

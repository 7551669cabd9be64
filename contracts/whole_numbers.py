"""JSON has one number type: ``16.0`` and ``1e1`` are integers where one is wanted, as some languages write them."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")

_Reader = Callable[[Any], Any]


def convert(value: Any, kind: type[T]) -> T:
    """``value``, as it was decoded from JSON, as ``kind``; raises msgspec.ValidationError as ``msgspec.convert`` does.

    Numbers inside what ``kind`` leaves open (``dict[str, Any]``: schemas, arguments) stay as they were written.
    """
    key: Any = kind  # Types are hashable, which mypy does not see.
    read = _reader_of(key)
    return msgspec.convert(value if read is None else read(value), kind)


def whole(number: Any) -> Any:
    """A float without a fraction as an integer; anything else as it is."""
    return int(number) if type(number) is float and number.is_integer() else number


@functools.cache
def _reader_of(kind: Any) -> _Reader | None:
    return _reader(inspect.type_info(kind))


def _reader(kind: inspect.Type) -> _Reader | None:
    """What makes integers of the floats that stand where ``kind`` has an integer; None where it has none."""
    if isinstance(kind, inspect.Metadata):
        return _reader(kind.type)
    if isinstance(kind, inspect.IntType):
        return whole
    if isinstance(kind, inspect.UnionType):
        # Each heeds values of its own kind alone.
        readers = [reader for reader in map(_reader, kind.types) if reader is not None]
        return (lambda value: functools.reduce(lambda found, read: read(found), readers, value)) if readers else None
    if isinstance(kind, (inspect.ListType, inspect.VarTupleType)):
        item = _reader(kind.item_type)
        return item and (lambda value: [item(part) for part in value] if isinstance(value, list) else value)
    if isinstance(kind, inspect.StructType):
        fields = {field.encode_name: reader for field in kind.fields if (reader := _reader(field.type)) is not None}
        return (lambda value: _with(value, fields) if isinstance(value, dict) else value) if fields else None
    return None


def _with(value: dict[str, Any], fields: dict[str, _Reader]) -> dict[str, Any]:
    return {name: fields[name](part) if name in fields else part for name, part in value.items()}

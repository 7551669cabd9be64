"""ClickHouse's forms of bytes over HTTP: compressed blocks, and Native as newer clients read it; pure."""

import re
import struct
from collections.abc import Iterable, Iterator

import lz4.block
from clickhouse_cityhash.cityhash import CityHash128

BLOCK_BYTES = 1 << 20
"""Most bytes of a block before compression."""
REVISION_NATIVE = 54454
"""From this client_protocol_version on, Native has a head before each block and a byte before each column's data."""

_NONE, _LZ4 = 0x02, 0x82
_HEAD = struct.Struct("<BII")  # method, compressed size with these 9 bytes, size


def packed(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Compressed blocks (``compress=1``): hash of what follows, method, sizes, LZ4 data."""
    held = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        while view:
            taken = view[: BLOCK_BYTES - len(held)]
            held += taken
            view = view[len(taken) :]
            if len(held) == BLOCK_BYTES:
                yield _block(held)
                held.clear()
    if held:
        yield _block(held)


def _block(data: bytearray) -> bytes:
    squeezed = lz4.block.compress(data, store_size=False)
    block = _HEAD.pack(_LZ4, _HEAD.size + len(squeezed), len(data)) + squeezed
    return _hash(block) + block


def _hash(block: bytes) -> bytes:
    first, second = divmod(CityHash128(block), 1 << 64)
    return struct.pack("<QQ", first, second)


def unpacked(data: bytes, most: int) -> bytes:
    """What compressed blocks hold; raises ValueError when they are broken, of another method (LZ4 and plain are
    read) or hold more than ``most`` bytes."""
    result, at = bytearray(), 0
    while at < len(data):
        if len(data) - at < 16 + _HEAD.size:
            raise ValueError("a compressed block is cut off")
        method, length, size = _HEAD.unpack_from(data, at + 16)
        block = data[at + 16 : at + 16 + length]
        if length < _HEAD.size or len(block) < length:
            raise ValueError("a compressed block is cut off")
        if size > most - len(result):
            raise ValueError(f"compressed blocks hold more than {most} bytes")
        if _hash(block) != data[at : at + 16]:
            raise ValueError("checksum of a compressed block does not match")
        if method == _LZ4:
            try:
                plain = lz4.block.decompress(block[_HEAD.size :], uncompressed_size=size)
            except lz4.block.LZ4BlockError as error:
                raise ValueError("LZ4 data of a compressed block is broken") from error
        elif method == _NONE:
            plain = block[_HEAD.size :]
        else:
            raise ValueError(f"compression method 0x{method:02x} is not spoken here, only LZ4")
        if len(plain) != size:
            raise ValueError("a compressed block holds less or more than it says")
        result += plain
        at += 16 + length
    return bytes(result)


def native(data: bytes) -> Iterator[bytes | memoryview]:
    """Native as the engine writes it -> the same as clients from REVISION_NATIVE on read it; raises ValueError
    (IndexError, for data that is cut off) when a column's type is not known here: states of aggregate functions,
    JSON, Variant, Dynamic, geometry."""
    view, at = memoryview(data), 0
    while at < len(data):
        yield b"\x01\x00\x02\xff\xff\xff\xff\x00"  # no overflow row, no bucket
        start = at
        columns, at = _varint(data, at)
        rows, at = _varint(data, at)
        for _ in range(columns):
            for _ in range(2):  # name and type
                length, at = _varint(data, at)
                text = at
                at += length
            kind = data[text:at].decode()
            yield view[start:at]
            yield b"\x00"  # no serialization of its own
            start = at
            if rows:
                at = _column_end(kind, data, at, rows)
        yield view[start:at]


_WIDTHS = {
    **dict.fromkeys(("Int8", "UInt8", "Bool", "Enum8", "Nothing"), 1),
    **dict.fromkeys(("Int16", "UInt16", "Date", "Enum16", "BFloat16"), 2),
    **dict.fromkeys(("Int32", "UInt32", "Float32", "Date32", "DateTime", "Time", "IPv4"), 4),
    **dict.fromkeys(("Int64", "UInt64", "Float64", "DateTime64", "Time64"), 8),
    **dict.fromkeys(("Int128", "UInt128", "UUID", "IPv6"), 16),
    **dict.fromkeys(("Int256", "UInt256"), 32),
}
_ARGUMENT = re.compile(r"'(?:[^'\\]|\\.)*'|`(?:[^`\\]|\\.)*`|[(), ]|[^(), '`]+")


def _split(kind: str) -> tuple[str, list[str]]:
    """``Tuple(a UInt8, b Array(String))`` -> ``Tuple``, [``UInt8``, ``Array(String)``]: names are left out."""
    name, _, inside = kind.removesuffix(")").partition("(")
    parts, depth = [""], 0
    for token in _ARGUMENT.findall(inside):
        depth += {"(": 1, ")": -1}.get(token, 0)
        if token == "," and not depth:
            parts.append("")
        elif token == " " and not depth and name in ("Tuple", "Nested"):
            parts[-1] = ""  # what stood before it was the name, or nothing
        else:
            parts[-1] += token
    return name, [part.strip() for part in parts if part.strip()]


def _column_end(kind: str, data: bytes, at: int, rows: int) -> int:
    """Where a column's data ends that begins at ``at``."""
    return _end(kind, data, at + 8 * kind.count("LowCardinality("), rows)  # a version for each comes first


def _end(kind: str, data: bytes, at: int, rows: int) -> int:
    name, inner = _split(kind)
    if rows == 0:
        return at
    if name in _WIDTHS or name.startswith("Interval"):
        return at + _WIDTHS.get(name, 8) * rows
    match name:
        case "String":
            for _ in range(rows):
                length = data[at]
                if length < 128:
                    at += 1 + length
                else:
                    length, at = _varint(data, at)
                    at += length
            return at
        case "FixedString":
            return at + int(inner[0]) * rows
        case "Decimal":
            digits = int(inner[0])
            return at + rows * next(width for most, width in ((9, 4), (18, 8), (38, 16), (76, 32)) if digits <= most)
        case "Nullable":
            return _end(inner[0], data, at + rows, rows)
        case "SimpleAggregateFunction":
            return _end(inner[-1], data, at, rows)
        case "Tuple":
            for part in inner:
                at = _end(part, data, at, rows)
            return at if inner else at + rows
        case "Array" | "Map":
            count = _u64(data, at + 8 * (rows - 1))  # ends of the rows; the last one counts all
            at += 8 * rows
            for part in inner:
                at = _end(part, data, at, count)
            return at
        case "LowCardinality":
            width = 1 << (data[at] & 0xFF)
            keys = _u64(data, at + 8)
            plain = re.sub(r"\ANullable\((.*)\)\Z", r"\1", inner[0])  # its keys hold a default for NULL
            at = _end(plain, data, at + 16, keys)
            return at + 8 + width * _u64(data, at)
    raise ValueError(f"the type {kind} is not written in Native here: turn it into text or another type")


def _u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at

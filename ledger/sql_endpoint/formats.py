"""The SQL endpoint's bytes: what a request's body holds, and how answers and errors are written; pure."""

import json
import re
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ledger.sql_endpoint.policy import QUERY_BYTES_MAX

PIECE_BYTES = 1 << 20
"""An answer is sent in pieces of this size, so that a slow reader is waited for."""

REVISION_NATIVE_MAX = 54453
"""Up to this client_protocol_version, Native is what the engine writes; later ones add to it."""

STATUS = {
    **dict.fromkeys((6, 26, 27, 36, 42, 43, 53, 62, 271, 456), 400),
    **dict.fromkeys((497, 516), 403),
    **dict.fromkeys((46, 47, 60, 73, 81), 404),
    48: 501,
    159: 408,
    202: 503,
}
"""ClickHouse's error code -> HTTP status; else 500, also for what is not allowed (164): drivers take 403 for a wrong
password."""

_TYPES = {
    "json": "application/json; charset=UTF-8",
    "tabseparated": "text/tab-separated-values; charset=UTF-8",
    "tsv": "text/tab-separated-values; charset=UTF-8",
    "csv": "text/csv; charset=UTF-8",
}


class Failed(Exception):
    """An error as ClickHouse tells it: code, text, name."""

    def __init__(self, code: int, name: str, text: str) -> None:
        super().__init__(f"Code: {code}. DB::Exception: {text}. ({name})")
        self.code = code


@dataclass(frozen=True)
class Result:
    """A query's rows. ``format``: the name of their format. ``rows_read``, ``bytes_read``: by it from tables."""

    format: str
    data: bytes
    rows_read: int
    bytes_read: int


def check_spoken(parameters: Mapping[str, str], content_type: str, content_encoding: str) -> None:
    """Raises Failed when the request speaks a part of ClickHouse's interface that is not spoken here."""
    for name in ("compress", "decompress"):
        if is_on(parameters, name):
            raise Failed(48, "NOT_IMPLEMENTED", f"ClickHouse's compressed blocks are not spoken here: set {name}=0")
    if content_type.lower().startswith("multipart/form-data") or content_encoding not in ("identity", "gzip"):
        raise Failed(48, "NOT_IMPLEMENTED", "a query comes as text here, plain or gzipped")


def is_on(parameters: Mapping[str, str], name: str) -> bool:
    """Whether a parameter is there and says yes."""
    return parameters.get(name, "0") not in ("0", "false", "")


def query_of(parameters: Mapping[str, str], body: bytes, content_encoding: str) -> str:
    """The statement, which may stand in the parameter ``query``, in the body, or begin there and end here.

    Raises Failed when there is none, or the body is no text.
    """
    text = gunzipped(body) if content_encoding == "gzip" else body
    try:
        query = "\n".join(part for part in (parameters.get("query", ""), text.decode()) if part.strip())
    except UnicodeDecodeError as error:
        raise Failed(36, "BAD_ARGUMENTS", str(error)) from error
    if not query:
        raise Failed(62, "SYNTAX_ERROR", "there is no query")
    return query


def gunzipped(data: bytes) -> bytes:
    """What the gzipped body holds; raises Failed when it is broken or holds more than QUERY_BYTES_MAX bytes."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        plain = unpacker.decompress(data, QUERY_BYTES_MAX)
    except zlib.error as error:
        raise Failed(271, "CANNOT_DECOMPRESS", str(error)) from error
    if not unpacker.eof:
        raise Failed(62, "SYNTAX_ERROR", "the query is too long or cut off")
    return plain


def pieces(data: bytes) -> Iterator[memoryview]:
    """The bytes in pieces of PIECE_BYTES at most."""
    view = memoryview(data)
    for start in range(0, len(view), PIECE_BYTES):
        yield view[start : start + PIECE_BYTES]


def gzipped(data: bytes) -> Iterator[bytes]:
    """The same as one gzip stream."""
    packer = zlib.compressobj(wbits=31, level=3)
    for piece in pieces(data):
        yield packer.compress(piece)
    yield packer.flush()


def headers(parameters: Mapping[str, str], result: Result, elapsed_ns: int) -> dict[str, str]:
    """Headers that say what an answer is; raises Failed when the client would misread it."""
    kind = result.format.lower()
    revision = parameters.get("client_protocol_version", "")
    if kind == "native" and revision.isdecimal() and int(revision) > REVISION_NATIVE_MAX:
        text = f"Native of client_protocol_version {revision}; ask for another format, or for {REVISION_NATIVE_MAX}"
        raise Failed(48, "NOT_IMPLEMENTED", text)
    summary = {
        "read_rows": result.rows_read,
        "read_bytes": result.bytes_read,
        "written_rows": 0,
        "written_bytes": 0,
        "total_rows_to_read": 0,
        "result_rows": 0,  # the engine does not say
        "result_bytes": len(result.data),
        "elapsed_ns": elapsed_ns,
    }
    query_id = re.sub(r"[^\x20-\x7e]", "", parameters.get("query_id", ""))[:100]
    return {
        "Content-Type": next((_TYPES[name] for name in _TYPES if kind.startswith(name)), "application/octet-stream"),
        "X-ClickHouse-Format": result.format,
        "X-ClickHouse-Query-Id": query_id or str(uuid.uuid4()),
        "X-ClickHouse-Summary": json.dumps(
            {name: str(value) for name, value in summary.items()}, separators=(",", ":")
        ),
    }

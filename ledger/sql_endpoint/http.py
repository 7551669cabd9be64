"""A read-only SQL door to the embedded engine: ClickHouse's HTTP interface, as far as clients that read need it.

Threads of its own, one for each connection, so that a slow reader stands in nobody's way; a few queries at a time.
Each query has a handle of its own on the engine, with limits and ``readonly=1`` set before it, so nothing of one
reaches the next. What may be asked is decided in sql.py, who may ask by one user and password.
"""

import base64
import binascii
import hmac
import json
import os
import re
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import structlog

from ledger import metrics
from ledger.sql_endpoint import native, policy

log = structlog.get_logger(__name__)

QUERIES_MAX = 2
"""At once; others wait for up to WAIT_S."""
WAIT_S = 20.0
CONNECTIONS_MAX = 64
IDLE_S = 120.0
BODY_BYTES_MAX = 1 << 20
REFUSAL_S = 0.3
"""How long a wrong password waits for its answer."""

LIMITS = {
    "max_execution_time": "30",
    "max_memory_usage": str(1 << 30),
    "max_result_rows": "1000000",
    "max_result_bytes": str(256 << 20),
    "result_overflow_mode": "'throw'",
    "max_threads": "2",
    "max_query_size": str(BODY_BYTES_MAX),
    "max_ast_elements": "50000",
    "session_timezone": "'UTC'",
    "do_not_merge_across_partitions_select_final": "1",
    "allow_introspection_functions": "0",
    "readonly": "1",
}
"""Set in this order, the last one for good."""

_NAMES = (
    "SELECT lower(name) FROM system.table_functions"
    " UNION ALL SELECT lower(name) FROM system.functions WHERE match(name, '^ai[A-Z]')"  # they call models elsewhere
)

_CLIENT_SETTING = re.compile(
    r"(output_format_(?!schema\Z)[a-z0-9_]+|format_(csv|tsv|custom)_[a-z0-9_]+|date_time_output_format)\Z"
)
"""Settings that a client may send: how answers look. Others are ignored: those of templates and schemas read and
write files (``output_format_schema`` too), the rest cannot be changed here."""
_LOWERED = ("max_execution_time", "max_result_rows", "max_result_bytes")
"""Limits that a client may make narrower (``Statement.setMaxRows`` of JDBC); with ``result_overflow_mode=break``."""
_OBJECTS = frozenset({"dataframe", "arrowtable"})
"""What chDB takes for formats and answers with Python's objects."""

_TYPES = {
    "json": "application/json; charset=UTF-8",
    "tabseparated": "text/tab-separated-values; charset=UTF-8",
    "tsv": "text/tab-separated-values; charset=UTF-8",
    "csv": "text/csv; charset=UTF-8",
}

_STATUS = {
    **dict.fromkeys((6, 26, 27, 36, 42, 43, 53, 62, 271, 456), 400),
    **dict.fromkeys((497, 516), 403),
    **dict.fromkeys((46, 47, 60, 73, 81), 404),
    48: 501,
    159: 408,
    202: 503,
}
"""ClickHouse's error code -> HTTP status; else 500, also for what is not allowed (164): drivers take 403 for a wrong
password, whose text they read as it is, and any other error for compressed with ``compress=1``."""


class Failed(Exception):
    """An error with ClickHouse's code."""

    def __init__(self, code: int, name: str, text: str) -> None:
        super().__init__(f"Code: {code}. DB::Exception: {text}. ({name})")
        self.code = code


@dataclass(frozen=True)
class Answer:
    """``kind``: the format's name. ``rows_read``, ``bytes_read``: by the query from tables."""

    kind: str
    data: bytes
    rows_read: int
    bytes_read: int


class Door:
    """Listens from ``start`` to ``close``. The engine must be open in this process."""

    def __init__(self, directory: str, database: str, listen: str, user: str, password: str) -> None:
        self._directory = os.path.realpath(directory)
        self.database = database
        self._user, self._password = user.encode(), password.encode()
        self._slots = threading.BoundedSemaphore(QUERIES_MAX)
        self._functions = frozenset[str]()
        self._listen = listen
        self._server: _Server | None = None

    @property
    def address(self) -> str:
        """``host:port`` where it listens."""
        assert self._server is not None
        return f"{self._server.server_address[0]!s}:{self._server.server_port}"

    def start(self) -> None:
        """Raises OSError when the address cannot be had."""
        names = self._perform(_NAMES, "TabSeparated", {}, {})
        self._functions = frozenset(names.data.decode().split())
        self._server = _Server(self._listen, self)
        threading.Thread(target=self._server.serve_forever, name="door", daemon=True).start()

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            for _ in range(QUERIES_MAX):  # running queries end before the engine does
                self._slots.acquire()

    def admits(self, user: str, password: str) -> bool:
        same_user = hmac.compare_digest(user.encode(), self._user)
        return hmac.compare_digest(password.encode(), self._password) and same_user

    def answer(self, query: str, parameters: dict[str, str]) -> Answer:
        """Raises Failed."""
        database = parameters.get("database") or self.database
        if database not in (self.database, "default"):
            raise Failed(81, "UNKNOWN_DATABASE", f"there is only the database {self.database} here")
        if not self._slots.acquire(timeout=WAIT_S):
            raise Failed(202, "TOO_MANY_SIMULTANEOUS_QUERIES", "too many queries run now, try again later")
        started = time.monotonic()
        try:
            # What the engine prints of the statement is judged, and is what runs.
            text = {"statement": query.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n")}
            printed = self._perform("SELECT formatQuerySingleLine({statement:String})", "TSVRaw", text, {})
            statement = printed.data.decode().rstrip("\n")
            try:
                policy.check(statement, self._functions)
            except policy.Forbidden as error:
                raise Failed(164, "READONLY", str(error)) from error
            kind = policy.format_of(statement, parameters.get("default_format") or "TabSeparated")
            if kind.lower() in _OBJECTS:
                raise Failed(73, "UNKNOWN_FORMAT", f"Unknown format {kind}")
            values = {name[6:]: value for name, value in parameters.items() if name.startswith("param_")}
            settings = {name: value for name, value in parameters.items() if _CLIENT_SETTING.match(name)}
            return self._perform(statement, kind, values, settings, _limits(parameters))
        finally:
            self._slots.release()
            metrics.DOOR_SECONDS.observe(time.monotonic() - started)

    def _perform(
        self,
        query: str,
        kind: str,
        values: dict[str, str],
        settings: dict[str, str],
        limits: dict[str, str] = LIMITS,
    ) -> Answer:
        """Run on a handle of its own, which cannot change anything."""
        import chdb

        handle = chdb.connect(self._directory)
        try:
            handle.query(f"USE `{self.database}`")
            for name, value in settings.items():
                quoted = value.replace("\\", "\\\\").replace("'", "\\'")
                handle.query(f"SET {name} = '{quoted}'")
            for name, value in limits.items():
                handle.query(f"SET {name} = {value}")
            result = handle.query(query, kind, params=values)
            return Answer(kind, bytes(result.bytes()), result.rows_read(), result.bytes_read())
        except Exception as error:
            raise _failed(error) from error
        finally:
            handle.close()


def _limits(parameters: dict[str, str]) -> dict[str, str]:
    """LIMITS, narrower where the client asks for it."""
    limits = dict(LIMITS)
    for name in _LOWERED:
        asked = parameters.get(name, "")
        if asked.isascii() and asked.isdecimal() and 0 < int(asked) < int(LIMITS[name]):
            limits[name] = asked
    if parameters.get("result_overflow_mode") == "break":
        limits["result_overflow_mode"] = "'break'"
    return limits


def _failed(error: Exception) -> Failed:
    """The engine's error, without what it wraps it in."""
    found = re.search(r"Code: (\d+)\. DB::Exception: (.*?)\.?\s*\(([A-Z_0-9]+)\)", str(error), re.DOTALL)
    if found is None:
        return Failed(1002, "UNKNOWN_EXCEPTION", str(error)[:1000])
    text = re.sub(r"^(Code: \d+\. DB::Exception: )+", "", found[2])
    return Failed(int(found[1]), found[3], text[:2000])


def _on(parameters: dict[str, str], name: str) -> bool:
    return parameters.get(name, "0") not in ("0", "false", "")


def _gzipped(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    packer = zlib.compressobj(wbits=31, level=3)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


def _gunzipped(data: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        plain = unpacker.decompress(data, BODY_BYTES_MAX)
    except zlib.error as error:
        raise Failed(271, "CANNOT_DECOMPRESS", str(error)) from error
    if not unpacker.eof:
        raise Failed(62, "SYNTAX_ERROR", "the query is too long or cut off")
    return plain


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, listen: str, door: Door) -> None:
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.door = door
        self._connections = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__((host, int(port)), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._connections.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("door_connection_broken")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "headrace"
    sys_version = ""
    timeout = IDLE_S
    disable_nagle_algorithm = True  # the last bytes of an answer are a small write of their own
    server: _Server

    def do_GET(self) -> None:
        self._handle(lambda: b"")

    def do_HEAD(self) -> None:
        self._handle(lambda: b"")

    def do_POST(self) -> None:
        self._handle(self._body)

    def _handle(self, read_body: Callable[[], bytes]) -> None:
        url = urlsplit(self.path)
        try:
            parameters = dict(parse_qsl(url.query, keep_blank_values=True, max_num_fields=1000))
            body = read_body()
            if url.path in ("/ping", "/replicas_status") or (self.command == "GET" and self.path == "/"):
                self._send(200, (b"Ok.\n",), "text/plain; charset=UTF-8")
                return
            if url.path not in ("", "/"):
                self._send(404, (b"There is no handle here; queries go to /.\n",), "text/plain; charset=UTF-8")
                return
            self._query(parameters, body)
        except Failed as error:
            self._fail(error)
        except (ValueError, UnicodeDecodeError) as error:
            self._fail(Failed(36, "BAD_ARGUMENTS", str(error)))

    def _query(self, parameters: dict[str, str], body: bytes) -> None:
        self._authenticate(parameters)
        compress = _on(parameters, "compress")
        try:
            self._answer(parameters, body, compress)
        except Failed as error:
            self._fail(error, compress)

    def _answer(self, parameters: dict[str, str], body: bytes, compress: bool) -> None:
        started = time.monotonic_ns()
        if _on(parameters, "decompress"):
            try:
                body = native.unpacked(body, BODY_BYTES_MAX)
            except ValueError as error:
                raise Failed(271, "CANNOT_DECOMPRESS", str(error)) from error
        parameters.setdefault("default_format", self.headers.get("X-ClickHouse-Format", ""))
        parameters.setdefault("database", self.headers.get("X-ClickHouse-Database", ""))
        parameters.setdefault("query_id", self.headers.get("X-ClickHouse-Query-Id", ""))
        try:
            query = "\n".join(part for part in (parameters.get("query", ""), body.decode()) if part.strip())
        except UnicodeDecodeError as error:
            raise Failed(36, "BAD_ARGUMENTS", str(error)) from error
        if not query:
            raise Failed(62, "SYNTAX_ERROR", "there is no query")
        answer = self.server.door.answer(query, parameters)
        pieces: Iterable[bytes | memoryview] = (answer.data,)
        revision = parameters.get("client_protocol_version", "")
        if answer.kind.lower() == "native" and revision.isdecimal() and int(revision) >= native.REVISION_NATIVE:
            try:
                pieces = list(native.native(answer.data))  # all judged before the head of the answer goes out
            except (ValueError, IndexError) as error:
                raise Failed(48, "NOT_IMPLEMENTED", str(error)) from error
        media = next((media for start, media in _TYPES.items() if answer.kind.lower().startswith(start)), "")
        summary = {
            "read_rows": answer.rows_read,
            "read_bytes": answer.bytes_read,
            "written_rows": 0,
            "written_bytes": 0,
            "total_rows_to_read": 0,
            "result_rows": 0,  # the engine does not say
            "result_bytes": len(answer.data),
            "elapsed_ns": time.monotonic_ns() - started,
        }
        more = {
            "X-ClickHouse-Format": answer.kind,
            "X-ClickHouse-Query-Id": re.sub(r"[^\x20-\x7e]", "", parameters["query_id"])[:100] or str(uuid.uuid4()),
            "X-ClickHouse-Summary": json.dumps(
                {name: str(value) for name, value in summary.items()}, separators=(",", ":")
            ),
        }
        if compress:
            pieces = native.packed(pieces)
        if parameters.get("enable_http_compression") == "1" and "gzip" in self.headers.get("Accept-Encoding", ""):
            pieces = _gzipped(pieces)
            more["Content-Encoding"] = "gzip"
        self._send(200, pieces, media or "application/octet-stream", more)

    def _authenticate(self, parameters: dict[str, str]) -> None:
        """By Basic, by ClickHouse's headers, or by parameters."""
        user, password = parameters.get("user", ""), parameters.get("password", "")
        if "X-ClickHouse-User" in self.headers:
            user, password = self.headers["X-ClickHouse-User"], self.headers.get("X-ClickHouse-Key", "")
        elif given := self.headers.get("Authorization", ""):
            scheme, _, secret = given.partition(" ")
            try:
                user, _, password = base64.b64decode(secret, validate=True).decode().partition(":")
            except (binascii.Error, UnicodeDecodeError):
                user = ""
            user = user if scheme.lower() == "basic" else ""
        if not self.server.door.admits(user, password):
            time.sleep(REFUSAL_S)
            raise Failed(516, "AUTHENTICATION_FAILED", "Authentication failed: user or password is wrong or missing")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            data = b""
            while size := int(self.rfile.readline(100).split(b";")[0], 16):
                if len(data) + size > BODY_BYTES_MAX:
                    self.close_connection = True
                    raise Failed(62, "SYNTAX_ERROR", "the query is too long")
                data += self.rfile.read(size)
                self.rfile.readline(100)
            self.rfile.readline(100)
        else:
            length = int(self.headers.get("Content-Length", 0))
            if not 0 <= length <= BODY_BYTES_MAX:
                self.close_connection = True
                raise Failed(62, "SYNTAX_ERROR", "the query is too long")
            data = self.rfile.read(length)
        kind = self.headers.get("Content-Type", "").split(";")[0].lower()
        coding = self.headers.get("Content-Encoding", "identity")
        if kind == "multipart/form-data" or coding not in ("identity", "gzip"):
            raise Failed(48, "NOT_IMPLEMENTED", "a query comes as text here, plain, gzipped or with decompress=1")
        return _gunzipped(data) if coding == "gzip" else data

    def _fail(self, error: Failed, compress: bool = False) -> None:
        more = {"X-ClickHouse-Exception-Code": str(error.code)}
        status = _STATUS.get(error.code, 500)
        if error.code == 516 and "Authorization" not in self.headers:
            status, more["WWW-Authenticate"] = 401, 'Basic realm="headrace"'
        text = f"{error}\n".encode()
        pieces = b"".join(native.packed((text,))) if compress and status not in (401, 403) else text
        self._send(status, (pieces,), "text/plain; charset=UTF-8", more)

    def _send(
        self, status: int, pieces: Iterable[bytes | memoryview], media: str, more: dict[str, str] | None = None
    ) -> None:
        """What is made while it is sent goes in chunks."""
        self.send_response(status)
        headers = {
            "Content-Type": media,
            "X-ClickHouse-Server-Display-Name": "headrace",
            "X-ClickHouse-Timezone": "UTC",
            **(more or {}),
        }
        chunked = not isinstance(pieces, tuple | list) and self.request_version != "HTTP/1.0"
        if chunked:
            headers["Transfer-Encoding"] = "chunked"
        elif isinstance(pieces, tuple | list):
            headers["Content-Length"] = str(sum(len(piece) for piece in pieces))
        else:
            headers["Connection"] = "close"  # its end is the answer's
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for piece in pieces:
            if not chunked:
                self.wfile.write(piece)
            elif piece:
                self.wfile.write(b"%x\r\n" % len(piece))
                self.wfile.write(piece)
                self.wfile.write(b"\r\n")
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a query may name a person."""

"""ClickHouse's HTTP interface as far as the ledger uses it, over chDB: a server that tests can start and kill.

``python clickhouse_http.py PORT DIRECTORY``. The real engine answers; only the transport is ours.
"""

import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import chdb
import lz4.frame

TRANSPORT = {"query", "query_id", "session_id", "session_timeout", "client_protocol_version", "default_format"}
TRANSPORT |= {"enable_http_compression", "wait_end_of_query", "send_progress_in_http_headers"}
TRANSPORT |= {"http_headers_progress_interval_ms", "database", "compress", "decompress", "buffer_size"}

lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    connection_to_engine: Any

    def do_GET(self) -> None:
        self.answer(b"Ok.\n")

    def do_POST(self) -> None:
        parameters = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        body = self.body()
        values = {name[6:]: text for name, text in parameters.items() if name.startswith("param_")}
        settings = {
            name: text for name, text in parameters.items() if name not in TRANSPORT and not name.startswith("param_")
        }
        try:
            with lock:
                data = self.run(parameters, body, values, settings)
        except Exception as error:
            text = str(error)
            code = text.partition("Code: ")[2].partition(".")[0]
            self.answer(text.encode(), 500, code or "1")
        else:
            self.answer(data)

    def run(self, parameters: dict[str, str], body: bytes, values: dict[str, str], settings: dict[str, str]) -> bytes:
        engine = self.connection_to_engine
        if database := parameters.get("database"):
            engine.query(f"USE `{database}`")
        query = parameters.get("query", "")
        if not query:
            head, _, rest = body.partition(b"\n")
            if head.startswith(b"INSERT INTO") and b" FORMAT " in head:
                query, body = head.decode(), rest
            else:
                query, body = body.decode(), b""
        clause = ", ".join(f"{name} = '{text}'" for name, text in settings.items())
        if query.lstrip().upper().startswith("INSERT") and "FORMAT" in query:
            target, _, kind = query.rpartition("FORMAT")
            with tempfile.NamedTemporaryFile() as file:
                file.write(body)
                file.flush()
                clause = f" SETTINGS {clause}" if clause else ""
                engine.query(f"{target} FROM INFILE '{file.name}'{clause} FORMAT {kind}")
            return b""
        for name, text in settings.items():
            engine.query(f"SET {name} = '{text}'")
        return bytes(engine.query(query, parameters.get("default_format", "TabSeparated"), params=values).bytes())

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return lz4.frame.decompress(data) if self.headers.get("Content-Encoding") == "lz4" else data

    def answer(self, data: bytes, status: int = 200, code: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-ClickHouse-Timezone", "UTC")
        if code:
            self.send_header("X-ClickHouse-Exception-Code", code)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    Handler.connection_to_engine = chdb.connect(sys.argv[2])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()

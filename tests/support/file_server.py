"""A web server of a model's files that fails as it is told."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class FileServer:
    """``status``: what it answers to everything; ``cut``: it sends half of each range."""

    def __init__(self, directory: Path) -> None:
        self.status = 0
        self.cut = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(b"", directory)

            def do_GET(self) -> None:
                self.answer(None, directory)

            def answer(self, shown: bytes | None, directory: Path) -> None:
                file = directory / self.path.lstrip("/")
                data = file.read_bytes() if file.is_file() else b""
                status, whole, begin = outer.status or (200 if file.is_file() else 404), len(data), 0
                if status == 200 and (given := self.headers.get("range")):
                    first, last = given.removeprefix("bytes=").split("-")
                    begin, status = int(first), 206
                    data = data[begin : int(last or whole) + 1]
                self.send_response(status)
                self.send_header("accept-ranges", "bytes")
                self.send_header("content-length", str(len(data)))
                if status == 206:
                    self.send_header("content-range", f"bytes {begin}-{begin + len(data) - 1}/{whole}")
                self.end_headers()
                half = outer.cut and len(data) > 1000
                self.wfile.write((data[: len(data) // 2] if half else data) if shown is None else shown)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FileServer":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

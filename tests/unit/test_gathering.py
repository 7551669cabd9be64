"""The page that gathers the metrics of a stack: every sample of every process, each family once."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gateway.management.gathering import Gathering, merged

ONE = """# HELP x_total Of x
# TYPE x_total counter
x_total{a="1 {b}"} 3.0
x_total{a="2"} 4.0
# HELP h Of h
# TYPE h histogram
h_bucket{le="+Inf"} 2
h_count{} 2
h_sum{} 1.5
"""
TWO = """# HELP y Of y
# TYPE y gauge
y 7.0
# HELP x_total Of x
# TYPE x_total counter
x_total{a="1 {b}"} 5.0
"""


def test_pages_become_one() -> None:
    families = list(text_string_to_metric_families(merged({"one": ONE, "two": TWO})))
    assert sorted(family.name for family in families) == ["h", "x", "y"]
    samples = {(s.name, *s.labels.items()): s.value for family in families for s in family.samples}
    assert samples == {
        ("x_total", ("service", "one"), ("a", "1 {b}")): 3,
        ("x_total", ("service", "one"), ("a", "2")): 4,
        ("x_total", ("service", "two"), ("a", "1 {b}")): 5,
        ("h_bucket", ("service", "one"), ("le", "+Inf")): 2,
        ("h_count", ("service", "one")): 2,
        ("h_sum", ("service", "one")): 1.5,
        ("y", ("service", "two")): 7,
    }


def test_who_does_not_answer_is_named_and_costs_nobody_its_page(tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(TWO.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    run = tmp_path / "run.json"
    assert b"headrace_service_up{" not in Gathering(run).page()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        urls = {"gateway": [f"http://127.0.0.1:{server.server_port}/metrics"], "worker": ["http://127.0.0.1:1/metrics"]}
        run.write_text(json.dumps({"metrics_urls": urls}))
        lines = Gathering(run).page().decode().splitlines()
    finally:
        server.shutdown()
        server.server_close()
    assert 'headrace_service_up{service="gateway-0"} 1' in lines
    assert 'headrace_service_up{service="worker-0"} 0' in lines
    assert 'y{service="gateway-0"} 7.0' in lines

"""What schemathesis is told beside the document: a model that exists, so that requests get past the first check."""

from typing import Any

import schemathesis

MODEL = "simulated"
DEADLINE_MS_MIN = 10_000
"""A shorter one may pass, on a busy machine: 504, and right so."""


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = MODEL
    return body


@schemathesis.hook
def map_headers(context: Any, headers: Any) -> Any:
    for name in list(headers or ()):
        if name.lower() == "x-headrace-deadline-ms" and headers[name].isdecimal() and len(headers[name]) < 5:
            headers[name] = str(DEADLINE_MS_MIN)
    return headers

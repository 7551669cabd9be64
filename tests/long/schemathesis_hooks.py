"""What schemathesis is told beside the document: a model that exists, so that requests get past the first check."""

from typing import Any

import schemathesis

MODEL = "simulated"


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str):
        body["model"] = MODEL
    return body

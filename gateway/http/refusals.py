"""Refusals while this gateway takes nothing new: from a request's head alone, past the application.

Under overload they are most of what there is to do, and must cost little: no body is waited for, nobody is
authenticated, no line is logged; they are counted (`headrace_shed`).
"""

from functools import cache

import msgspec

from contracts import errors, ids
from gateway import metrics
from gateway.apis.response_format import ResponseFormat
from gateway.apis.table import APIS, format_of
from gateway.http.edge import origin_headers
from gateway.http.exchange import Headers
from gateway.http.framing import Head
from gateway.intake.shedding import MESSAGE, Shedding

_COUNTS = ("/v1/messages/count_tokens", "/v1/responses/input_tokens")
SHED_PATHS = frozenset({*_COUNTS, *(api.path for api in APIS.values())})
"""What costs a gateway much; all else is served."""


class Refusals:
    """Of one server."""

    def __init__(self, shedding: Shedding, cors_origins: tuple[str, ...]) -> None:
        self._shedding = shedding
        self._origins = {origin.encode() for origin in cors_origins}

    def of(self, head: Head) -> tuple[int, Headers, bytes] | None:
        """Status, headers and body of the answer, if the request is refused."""
        path = head.path.rstrip("/")
        if head.method != "POST" or path not in SHED_PATHS or self._shedding.admits():
            return None
        form = format_of(path, head.headers)
        request_id = ids.request_id().encode()
        body = _body(form).replace(_ID, request_id)
        headers: Headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"%d" % self._shedding.shed()),
            (b"x-request-id", request_id),
            *origin_headers(head.headers, self._origins),
        ]
        if form.request_id_header:
            headers.append((form.request_id_header, request_id))
        metrics.http_requests(path, _STATUS).inc()
        return errors.TABLE["overloaded"].status, headers, body


_ID = b"00000000-0000-7000-8000-000000000000"
_STATUS = str(errors.TABLE["overloaded"].status)


@cache
def _body(form: ResponseFormat) -> bytes:
    """Of an API's refusals, with _ID where each has its own."""
    return msgspec.json.encode(form.error_body("overloaded", MESSAGE, None, _ID.decode()))

"""Refusals while this gateway takes nothing new: from a request's head alone, past the application.

Under overload they are most of what there is to do, and must cost little: no body is waited for, nobody is
authenticated, no line is logged; they are counted (`headrace_shed`).
"""

import msgspec

from contracts import ids
from contracts.errors import HeadraceError
from gateway import metrics
from gateway.apis.table import APIS, format_of
from gateway.http.edge import origin_headers
from gateway.http.exchange import Headers
from gateway.http.framing import Head
from gateway.intake.shedding import Shedding

_COUNT = "/v1/messages/count_tokens"
SHED_PATHS = frozenset({_COUNT, *(api.path for api in APIS.values())})
"""What costs a gateway much; all else is served."""


class Refusals:
    """Of one server."""

    def __init__(self, shedding: Shedding, cors_origins: tuple[str, ...]) -> None:
        self._shedding = shedding
        self._origins = {origin.encode() for origin in cors_origins}

    def of(self, head: Head) -> tuple[int, Headers, bytes] | None:
        """Status, headers and body of the answer, if the request is refused."""
        path = head.path.rstrip("/")
        if not self._shedding.refusing or head.method != "POST" or path not in SHED_PATHS:
            return None
        try:
            self._shedding.check()
        except HeadraceError as error:
            request_id = ids.request_id()
            form = format_of(path, head.headers)
            body = msgspec.json.encode(form.error_body(error.code, error.message, error.param, request_id))
            headers: Headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"retry-after", b"%d" % (error.retry_after_s or 1)),
                (b"x-request-id", request_id.encode()),
                *origin_headers(head.headers, self._origins),
            ]
            if form.request_id_header:
                headers.append((form.request_id_header, request_id.encode()))
            metrics.REQUESTS.labels(path, str(error.status)).inc()
            return error.status, headers, body
        return None

"""Every error that a caller can see: code -> HTTP status and OpenAI error type. The one table."""

import msgspec


class ErrorSpec(msgspec.Struct, frozen=True):
    """What a code means over HTTP. ``type`` is OpenAI's error type."""

    status: int
    type: str
    retry_after: bool = False
    """Whether answers carry an integer ``Retry-After``, computed for each; none where nobody can know."""


_INVALID = "invalid_request_error"

TABLE: dict[str, ErrorSpec] = {
    # What the caller must change.
    "invalid_request": ErrorSpec(400, _INVALID),
    "invalid_json": ErrorSpec(400, _INVALID),
    "context_length_exceeded": ErrorSpec(400, _INVALID),
    "request_exceeds_limit": ErrorSpec(400, _INVALID),
    "invalid_api_key": ErrorSpec(401, "authentication_error"),
    "permission_denied": ErrorSpec(403, "permission_error"),
    "model_not_found": ErrorSpec(404, _INVALID),
    "not_found": ErrorSpec(404, _INVALID),
    "method_not_allowed": ErrorSpec(405, _INVALID),
    "request_timeout": ErrorSpec(408, _INVALID),
    "conflict": ErrorSpec(409, _INVALID),
    "request_too_large": ErrorSpec(413, _INVALID),
    "unsupported_media_type": ErrorSpec(415, _INVALID),
    "idempotency_key_reused": ErrorSpec(422, _INVALID),
    # Limits of the tenant, and of the service.
    "rate_limit_exceeded": ErrorSpec(429, "rate_limit_error", retry_after=True),
    "insufficient_quota": ErrorSpec(429, "insufficient_quota", retry_after=True),
    "overloaded": ErrorSpec(529, "overloaded_error", retry_after=True),
    "unavailable": ErrorSpec(503, "service_unavailable", retry_after=True),
    # Outcomes after admission.
    "deadline_exceeded": ErrorSpec(504, "timeout_error"),
    "cancelled": ErrorSpec(499, "cancelled"),
    "slow_reader": ErrorSpec(499, "slow_reader"),
    "engine_error": ErrorSpec(500, "server_error"),
    "worker_lost": ErrorSpec(502, "server_error"),
    "request_quarantined": ErrorSpec(500, "server_error"),
    "stream_interrupted": ErrorSpec(502, "server_error"),
    "shutting_down": ErrorSpec(503, "service_unavailable", retry_after=True),
    "internal_error": ErrorSpec(500, "server_error"),
}


_REPEATED = (408, 409, 425, 429)
"""Statuses below 500 that a repeat may mend, as the official SDKs see it, too."""
_IN_VAIN = ("insufficient_quota", "request_quarantined")
"""Codes whose status says otherwise."""


def may_mend(code: str, status: int = 0) -> bool:
    """Whether the same request, asked again, may be answered; ``status`` where it is not the code's own.

    Where it may not, answers over HTTP carry ``x-should-retry: false``, which the official SDKs obey.
    """
    status = status or TABLE[code].status
    return code not in _IN_VAIN and (status >= 500 or status in _REPEATED)


class HeadraceError(Exception):
    """An error with a code of TABLE. ``param`` names the offending field; ``retry_after_s`` is computed."""

    def __init__(self, code: str, message: str, *, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        """HTTP status of the code."""
        return TABLE[self.code].status


def body(code: str, message: str, param: str | None = None) -> dict[str, object]:
    """OpenAI's error body for ``code``."""
    return {"error": {"message": message, "type": TABLE[code].type, "param": param, "code": code}}

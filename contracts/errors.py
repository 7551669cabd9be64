"""Every error that a caller or the bus can see: code -> HTTP status, OpenAI type, family. The one table.

The family says what comes next (HOUSE_STYLE.md, Errors): *rejected* was never queued, *expired* was queued and
never ran, *transient* may succeed later, *permanent* never will, *bug* is a broken invariant. The bus verdict
follows from the family.
"""

import enum
from typing import Literal

import msgspec

Verdict = Literal["ack", "nak", "term", "crash"]


class Family(enum.Enum):
    REJECTED = "rejected"
    EXPIRED = "expired"
    TRANSIENT = "transient"
    PERMANENT = "permanent"
    BUG = "bug"

    @property
    def verdict(self) -> Verdict:
        """What happens to the bus message that led here."""
        return _VERDICTS[self]


_VERDICTS: dict[Family, Verdict] = {
    Family.REJECTED: "ack",
    Family.EXPIRED: "ack",
    Family.TRANSIENT: "nak",
    Family.PERMANENT: "term",
    Family.BUG: "crash",
}


class Entry(msgspec.Struct, frozen=True):
    """One row of the table. ``type`` is OpenAI's error type, ``status`` the HTTP status."""

    status: int
    type: str
    family: Family
    retry_after: bool = False
    """Whether answers carry an integer ``Retry-After``."""


_INVALID = "invalid_request_error"
_R, _E, _T, _P, _B = Family.REJECTED, Family.EXPIRED, Family.TRANSIENT, Family.PERMANENT, Family.BUG

TABLE: dict[str, Entry] = {
    # What the caller must change.
    "invalid_request": Entry(400, _INVALID, _R),
    "invalid_json": Entry(400, _INVALID, _R),
    "context_length_exceeded": Entry(400, _INVALID, _R),
    "request_exceeds_limit": Entry(400, _INVALID, _R),
    "invalid_api_key": Entry(401, "authentication_error", _R),
    "permission_denied": Entry(403, "permission_error", _R),
    "model_not_found": Entry(404, _INVALID, _R),
    "not_found": Entry(404, _INVALID, _R),
    "method_not_allowed": Entry(405, _INVALID, _R),
    "request_timeout": Entry(408, _INVALID, _R),
    "conflict": Entry(409, _INVALID, _R),
    "request_too_large": Entry(413, _INVALID, _R),
    "unsupported_media_type": Entry(415, _INVALID, _R),
    # Limits of the tenant, and of the service.
    "rate_limit_exceeded": Entry(429, "rate_limit_error", _R, retry_after=True),
    "insufficient_quota": Entry(429, "insufficient_quota", _R, retry_after=True),
    "overloaded": Entry(529, "overloaded_error", _R, retry_after=True),
    "unavailable": Entry(503, "service_unavailable", _T, retry_after=True),
    # Outcomes after admission.
    "deadline_exceeded": Entry(504, "timeout_error", _E),
    "cancelled": Entry(499, "cancelled", _E),
    "slow_reader": Entry(499, "slow_reader", _P),
    "engine_error": Entry(500, "server_error", _P),
    "worker_lost": Entry(502, "server_error", _P),
    "request_quarantined": Entry(500, "server_error", _P),
    "stream_interrupted": Entry(502, "server_error", _P),
    "shutting_down": Entry(503, "service_unavailable", _T, retry_after=True),
    "internal_error": Entry(500, "server_error", _B),
}


class HeadraceError(Exception):
    """An error with a code of TABLE. ``param`` names the offending field; ``retry_after_s`` is computed."""

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def entry(self) -> Entry:
        return TABLE[self.code]


def body(code: str, message: str, param: str | None = None) -> dict[str, object]:
    """OpenAI's error body for ``code``."""
    return {"error": {"message": message, "type": TABLE[code].type, "param": param, "code": code}}

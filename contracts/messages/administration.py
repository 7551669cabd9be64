"""Administration: what operators ask of the admin service by way of a gateway, and the audit trail."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from contracts.messages.base import MANY, NOTHING, Line, Message, Name, RequestId, Text
from contracts.messages.frames import ErrorData

Via = Literal["api", "console", "cli"]

LoginFailure = Literal["unknown", "revoked", "expired", "address", "tenant", "scope"]
"""No such key; a known key that was revoked, has expired, came from a network that is not its own, whose tenant is
disabled, or that is not for what it tried in the administration."""

Result = Literal["intended", "done", "refused", "failed"]


class AdminCall(Message, frozen=True, kw_only=True):
    """Gateway -> scheduler, ``admin.v1.do.<action>``: one action, with the key that must permit it."""

    secret: Line
    """The caller's API key: who serves the call judges it itself."""
    address: Line
    request_id: RequestId
    via: Via = "api"
    target: Line = ""
    """What is changed: a tenant's or model's name, a key's id; empty for what is made."""
    form: msgspec.Raw = NOTHING
    """The action's own form (contracts.forms), as it was sent."""


class AdminAnswer(Message, frozen=True, kw_only=True):
    """What came of it: the changed record, or why not."""

    result: msgspec.Raw = NOTHING
    error: ErrorData | None = None


class FailedLogin(Message, frozen=True, kw_only=True):
    """Failures of one address since the last report."""

    address: Name
    reason: LoginFailure
    key_id: Name = ""
    """Of a key that is known."""
    count: Annotated[int, Meta(ge=1, le=1_000_000)] = 1


USED_MAX, OUTDATED_MAX, FAILED_MAX = 1000, 50, 100
"""Of a report: what is beyond waits for the next one, failures as a number."""


class KeyActivity(Message, frozen=True, kw_only=True):
    """Gateway -> scheduler, ``admin.v1.activity``: uses of keys, failed logins. Answered once it is kept."""

    used: Annotated[dict[Name, Annotated[int, Meta(ge=0)]], Meta(max_length=USED_MAX)] = {}
    """Key id -> start of the minute, Unix ms."""
    outdated: Annotated[list[Line], Meta(max_length=OUTDATED_MAX)] = []
    """Secrets whose keys are under the previous pepper; they move to the current one."""
    failed: Annotated[list[FailedLogin], Meta(max_length=FAILED_MAX)] = []
    failed_unlisted: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 0
    """Failures beyond those that a report lists."""


class ActivityAnswer(Message, frozen=True, kw_only=True):
    """It is kept."""


class AuditEntry(Message, frozen=True, kw_only=True):
    """An entry of the stream AUDIT, ``audit.v1.<area>``; never a secret.

    An action has two with the same id: ``intended`` before anything is done, without which nothing is done; then what
    came of it. One without a second was cut off, and may have been done.
    """

    id: Name
    at_ms: int
    actor: Line
    """Key id; ``operator`` for who has the operator's credentials of the bus; empty when nobody is known."""
    address: Line
    via: Via
    action: Line
    """Area and verb: ``keys.create``; ``logins.failed``."""
    target: Line
    result: Result
    reason: Text = ""
    """Why it was refused or failed."""
    asked: Annotated[dict[Line, Any], MANY] = {}
    """What was asked for, in the first of the two."""
    before: Annotated[dict[Line, Any], MANY] = {}
    """Changed fields as they were."""
    after: Annotated[dict[Line, Any], MANY] = {}
    request_id: RequestId = ""
    count: int = 1
    """Of failures that the entry stands for."""

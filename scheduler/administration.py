"""The admin service: performs what operators ask of it by way of a gateway, and keeps what gateways saw of keys.

Every scheduler process serves it: records are changed by compare-and-set, so that no owner is needed. A gateway cannot
write keys, tenants or models; it passes on the caller's key, which is judged here again from the records themselves. So
who has taken over a gateway makes no key without one that may.
"""

import asyncio
import time

import msgspec
import structlog

from contracts import audit, clock, keys, registry, subjects
from contracts.administration import ACTIONS, Administration
from contracts.audit import Actor
from contracts.bus import Bus, BusError, Incoming, Subscription
from contracts.errors import HeadraceError
from contracts.keys import ADMIN_SCOPES, Peppers
from contracts.messages.administration import (
    ActivityAnswer,
    AdminAnswer,
    AdminCall,
    AuditEntry,
    FailedLogin,
    KeyActivity,
)
from contracts.messages.base import Codec
from contracts.messages.frames import ErrorData
from contracts.messages.records import KeyRecord, Scope

log = structlog.get_logger()

QUEUE = "administration"
CALLS_MAX = 8
"""Calls at a time: people make them."""
FAILURES_PER_MIN = 120
"""Entries of failed logins by this process; those beyond are counted in one entry. A guess: one address a gateway and
second fills its 50,000 entries of the trail in seven hours, and takes no room from actions."""

_CALL = Codec[AdminCall](AdminCall)
_ANSWER = Codec[AdminAnswer](AdminAnswer)
_ACTIVITY = Codec[KeyActivity](KeyActivity)
_KEPT = Codec[ActivityAnswer](ActivityAnswer).encode(ActivityAnswer())


class AdminService:
    """Serves between ``start`` and ``close``."""

    def __init__(self, bus: Bus, peppers: Peppers) -> None:
        self._bus = bus
        self._peppers = peppers
        self._failures = FailureLog(bus)
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Share the calls with the other schedulers."""
        for subject, handler in ((subjects.ADMIN_CALLS, self._on_call), (subjects.ADMIN_ACTIVITY, self._on_activity)):
            self._subscriptions.append(
                await self._bus.subscribe(subject, handler, queue=QUEUE, concurrent=True, limit=CALLS_MAX)
            )

    async def close(self) -> None:
        """Take no more; what is under way is answered."""
        for subscription in self._subscriptions:
            await subscription.close()

    async def _on_call(self, message: Incoming) -> None:
        try:
            result = await self._perform(subjects.action_of_admin_call(message.subject), message.data)
            answer = AdminAnswer(result=msgspec.Raw(msgspec.json.encode(result)))
        except HeadraceError as error:
            answer = _refusal(error)
        except BusError as error:
            log.error("admin_call_failed", subject=message.subject, reason=str(error))
            answer = _refusal(HeadraceError("unavailable", "The bus failed; it may have been done.", retry_after_s=2))
        message.respond(_ANSWER.encode(answer))

    async def _perform(self, name: str, data: bytes) -> msgspec.Struct:
        action = ACTIONS.get(name)
        if action is None:
            raise HeadraceError("not_found", "There is no such action.")
        try:
            call = _CALL.decode(data)
        except msgspec.MsgspecError as error:
            raise HeadraceError("invalid_json", "Not an AdminCall.") from error
        key = await self._judge(call, action.scope)
        actor = Actor(name=key.id, address=call.address, via=call.via, request_id=call.request_id)
        try:
            form = msgspec.json.decode(call.form or b"{}", type=action.form)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise HeadraceError("invalid_json", f"Not a {action.form.__name__}: {error}.") from error
        do = Administration(self._bus, actor, granted=key.scopes, peppers=self._peppers)
        return await action.perform(do, call.target, form)

    async def _judge(self, call: AdminCall, scope: Scope | None) -> KeyRecord:
        """The key of the call, as the buckets have it now; raises HeadraceError.

        What fails here is recorded among failed logins, whose number is bounded: any caller's key could make such calls
        by way of a gateway that was taken over.
        """
        records = await registry.keys_of_secret(self._bus, self._peppers, call.secret.encode())
        tenant = await registry.tenant(self._bus, records[0].tenant) if records else None
        reason = keys.failure_of(records, tenant, call.address, clock.now_ms())
        if reason is None:
            if set(records[0].scopes) & (set(ADMIN_SCOPES) if scope is None else {scope}):
                return records[0]
            reason = "scope"
        known = records[0].id if records else ""
        await self._failures.take([FailedLogin(address=call.address, reason=reason, key_id=known)], 0)
        if reason == "scope":
            raise HeadraceError("permission_denied", f"This API key is not for {scope or 'the administration'}.")
        raise HeadraceError("invalid_api_key", "The API key is not valid, or no longer.")

    async def _on_activity(self, message: Incoming) -> None:
        try:
            activity = _ACTIVITY.decode(message.data)
        except msgspec.MsgspecError:
            return
        try:
            for secret in activity.outdated:
                await registry.move_key(self._bus, self._peppers, secret.encode())
            now_ms = clock.now_ms()
            uses = activity.used.items()
            await asyncio.gather(*(registry.keep_use(self._bus, key_id, min(at_ms, now_ms)) for key_id, at_ms in uses))
            await self._failures.take(activity.failed, activity.failed_unlisted)
        except (BusError, HeadraceError) as error:
            log.warning("key_activity_not_kept", reason=str(error))
            return  # the gateway reports it again
        message.respond(_KEPT)


class FailureLog:
    """Failed logins in the audit trail, so many in a minute; the rest as a number."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._room = float(FAILURES_PER_MIN)
        self._at = time.monotonic()
        self._unlisted = 0

    async def take(self, failed: list[FailedLogin], unlisted: int) -> None:
        """Raises HeadraceError when the trail takes no entry."""
        now = time.monotonic()
        self._room = min(FAILURES_PER_MIN, self._room + (now - self._at) * FAILURES_PER_MIN / 60)
        self._at = now
        listed = failed[: int(self._room)]
        self._room -= len(listed)
        for each in listed:
            await audit.append(self._bus, _entry(each.key_id, each.address, each.reason, each.count))
        self._unlisted += unlisted + sum(each.count for each in failed[len(listed) :])
        if self._unlisted and self._room >= 1:
            self._room -= 1
            await audit.append(self._bus, _entry("", "", "unlisted", self._unlisted))
            self._unlisted = 0


def _entry(key_id: str, address: str, reason: str, count: int) -> AuditEntry:
    return AuditEntry(
        id=audit.new_id(),
        at_ms=clock.now_ms(),
        actor=key_id,
        address=address,
        via="api",
        action="logins.failed",
        target="",
        result="refused",
        reason=reason,
        count=count,
    )


def _refusal(error: HeadraceError) -> AdminAnswer:
    data = ErrorData(code=error.code, message=error.message, param=error.param, retry_after_s=error.retry_after_s)
    return AdminAnswer(error=data)

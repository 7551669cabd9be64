"""Who asks is answered: known already, joined to what runs under its key, admitted, or refused."""

import heapq

from contracts.errors import HeadraceError
from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.base import Epoch
from contracts.messages.records import ModelRecord
from contracts.tokens import reserved
from scheduler.core import events, outcomes
from scheduler.core.accused import body_key
from scheduler.core.admission import RETRY_AFTER_S_MAX
from scheduler.core.lifecycle import UNHEARD
from scheduler.core.quota_leases import LeaseAwaited
from scheduler.core.quotas import seconds
from scheduler.core.request import Request
from scheduler.core.settings import Settings
from scheduler.core.transitions import State
from scheduler.core.watch import Watch

READERS_MAX = 16
"""Of one request under an idempotency key."""
UNSURE_MAX = 1000
"""Askings under unknown idempotency keys that wait for the end of a takeover; who was dropped asks again."""
WAITERS_MAX = 16
"""Cancels of one request that wait for its end, and askings that wait to join it; who was dropped asks again."""


class Asking(Watch):
    """One model's admissions."""

    def __init__(
        self, *, model: str, owner: str, epoch: Epoch, record: ModelRecord, settings: Settings, now_ms: int
    ) -> None:
        super().__init__(model=model, owner=owner, epoch=epoch, record=record, settings=settings, now_ms=now_ms)
        self.refusals: dict[str, int] = {}
        """Refused admissions by code, for metrics."""
        self._unsure: list[events.AdmissionAsked] = []
        self._awaiting: dict[str, dict[str, events.AdmissionAsked]] = {}
        """Askings that wait for a lease, by tenant and request id; who was dropped asks again."""
        self._short_of: dict[str, None] = {}
        """Tenants for whom more is to be leased at the end of this step."""
        self._expiries: list[tuple[int, str]] = []
        """A heap of (when the reservation expires, request id) of all that was admitted."""

    def _admission_asked(self, event: events.AdmissionAsked) -> None:
        asked = event.asked
        known = self.requests.get(asked.request_id)
        if known is not None and known.tenant == asked.tenant:
            self.do(events.AnswerAdmission(event.handle, self._admitted(known)))
            return
        try:
            if known is not None or self.tombstones.ended(asked.request_id) is not None:
                raise HeadraceError("conflict", "A request with this id is known already.")
            if self.tombstones.cancelled(asked.request_id):
                raise HeadraceError("cancelled", "The request was cancelled.")
            if joined := self._joined(asked):
                unstored = self.requests.get(joined)
                if unstored is not None and unstored.state is State.ADMITTED:  # It may never be.
                    unstored.joining = [*unstored.joining[1 - WAITERS_MAX :], event]
                    return
                limits = self.admission.quota(asked.tenant, self.now_ms).rate_limits(self.now_ms)
                self.do(
                    events.AnswerAdmission(event.handle, AdmissionAnswer(admitted=True, joined=joined, limits=limits))
                )
                return
            if self.recovering and asked.idempotency is not None:
                # What the owner before us dispatched under this key may yet be found.
                self._unsure = [*self._unsure[1 - UNSURE_MAX :], event]
                return
            body = self.accused.of(asked)
            if body.condemned:
                raise HeadraceError("request_quarantined", outcomes.quarantined(asked.request_id, body))
            self._check_workers()
            version, arm = self.versions.assign(asked)
            deadline_ms = self.admission.check(
                asked,
                self.now_ms,
                has_room=self.pool.has_room(version),
                start_ms=self._worker_start_ms(),
                prompt=self.pool.expected(asked.prompt_tokens, self.replicas.means.uncached, version, self.now_ms),
            )
        except LeaseAwaited:
            self._await_lease(event)
            return
        except HeadraceError as error:
            self.refusals[error.code] = self.refusals.get(error.code, 0) + 1
            if error.code == "overloaded":
                self.replicas.refused(body_key(asked), reserved(asked).input_tokens, self.now_ms)
            self.do(events.AnswerAdmission(event.handle, self._refused(asked, error)))
            return
        request = Request.admitted(
            asked,
            version=version,
            arm=arm,
            now_ms=self.now_ms,
            publish_within_ms=self.settings.publish_within_ms,
            deadline_ms=deadline_ms,
        )
        self.admit(request)
        self.read_by(request, asked.reader, asked.stream_owner)
        heapq.heappush(self._expiries, (self._expires_at_ms(request), request.id))
        self.do(events.AnswerAdmission(event.handle, self._admitted(request)))

    def _await_lease(self, event: events.AdmissionAsked) -> None:
        """Ask again once this shard has leased what the request needs of its tenant's limits."""
        tenant, request_id = event.asked.tenant, event.asked.request_id
        waiting = self._awaiting.setdefault(tenant, {})
        if len(waiting) < UNSURE_MAX:
            waiting[request_id] = event
            self._short_of[tenant] = None

    def _exchange_lease(self, tenant: str) -> None:
        waiting = [reserved(event.asked) for event in self._awaiting.get(tenant, {}).values()]
        if (ask := self.admission.lease(tenant, waiting, self.now_ms)) is not None:
            self.do(events.ExchangeLease(tenant, ask))

    def _lease_exchanged(self, event: events.LeaseExchanged) -> None:
        self.admission.leased(event.tenant, event.grant, self.now_ms)
        waiting = self._awaiting.pop(event.tenant, {})
        if event.grant is not None:  # Else nobody is answered, and who asked asks again.
            for asked in waiting.values():
                self._admission_asked(asked)

    def _check_workers(self) -> None:
        """Raises HeadraceError while every worker is slow: what is admitted would wait for nobody knows how long."""
        if since_ms := self.pool.all_slow_since_ms():
            raise HeadraceError(
                "overloaded",
                "The model's workers have more to do than they can, and take nothing new.",
                # What has lasted for so long lasts as long again, as far as anybody knows.
                retry_after_s=min(RETRY_AFTER_S_MAX, seconds(self.now_ms - since_ms)),
            )

    def _worker_start_ms(self) -> int:
        """How long until there is a worker, where there is none."""
        if any(worker.beat.state == "ready" for worker in self.pool.workers.values()):
            return 0
        return self.replicas.wait_for_worker_ms(self.now_ms)

    def _joined(self, asked: AdmissionRequest) -> str:
        """Id of the request that runs or ran under the same key; empty when there is none. Raises HeadraceError."""
        given = asked.idempotency
        named = self.keys.find(asked.tenant, given.key) if given is not None else None
        if given is None or named is None:
            if asked.join_only:
                raise HeadraceError("not_found", "No request has this idempotency key here.")
            return ""
        if not named.request_id:
            raise HeadraceError("cancelled", "The request of this idempotency key was cancelled.")
        if named.digest != given.digest:
            raise HeadraceError(
                "idempotency_key_reused",
                f"This idempotency key names another request, {named.request_id}: use a key for one request only.",
            )
        request = self.requests.get(named.request_id)
        if request is None:
            if self.tombstones.ended(named.request_id) is None:
                raise HeadraceError(
                    "conflict", f"Request {named.request_id} of this idempotency key has ended; its answer is not kept."
                )
        elif request.is_withdrawn or (request.unconfirmed and set(request.readers or ()) == {UNHEARD}):
            raise HeadraceError(
                "unavailable", "The request of this idempotency key is still being withdrawn.", retry_after_s=1
            )
        elif len(request.readers or ()) >= READERS_MAX:
            raise HeadraceError("conflict", f"{READERS_MAX} callers read the request of this idempotency key already.")
        elif request.state is not State.ADMITTED:
            self.read_by(request, asked.reader, asked.stream_owner)
        return named.request_id

    def _admitted(self, request: Request) -> AdmissionAnswer:
        return AdmissionAnswer(
            admitted=True,
            epoch=self.epoch,
            admitted_at_ms=request.envelope.admitted_at_ms,
            publish_within_ms=request.envelope.publish_within_ms,
            deadline_ms=request.envelope.deadline_ms,
            version=request.envelope.version,
            arm=request.envelope.arm,
            limits=self.admission.quota(request.tenant, self.now_ms).rate_limits(self.now_ms),
        )

    def _refused(self, asked: AdmissionRequest, error: HeadraceError) -> AdmissionAnswer:
        return AdmissionAnswer(
            admitted=False,
            epoch=self.epoch,
            code=error.code,
            message=error.message,
            param=error.param,
            retry_after_s=error.retry_after_s,
            limits=self.admission.quota(asked.tenant, self.now_ms).rate_limits(self.now_ms),
        )

    def _expires_at_ms(self, request: Request) -> int:
        return request.envelope.publish_by_ms + self.settings.expiry_margin_ms

"""What the long run's callers were billed, from the ledger's own table: each request once, for what the rules say."""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from contracts.messages.control import SERVICE_FAULTS
from ledger.core.queries import Query
from ledger.store import Store
from tests.chaos.callers import BusCall, Request
from tests.support.cluster import Call

_ATTEMPTS = """
    SELECT toString(request_id), attempt, outcome, billable, worker, prompt_tokens, completion_tokens, error_message,
        client_request_id
    FROM attempts FINAL ORDER BY request_id, attempt
"""


class Attempt(NamedTuple):
    """A row of the ledger."""

    request_id: str
    attempt: int
    outcome: str
    billable: bool
    worker: str
    prompt_tokens: int
    completion_tokens: int
    error_message: str
    client_request_id: str


Attempts = dict[str, list[Attempt]]
"""By request id, in order."""


async def read(ledger: Path) -> Attempts:
    """All rows of the chDB directory of a ledger that has stopped."""
    store = Store(f"chdb://{ledger}", "headrace")
    await store.open()
    try:
        rows = [Attempt(*row) for row in await store.select(Query(_ATTEMPTS, {}))]
    finally:
        await store.close()
    found: Attempts = defaultdict(list)
    for row in rows:
        found[row.request_id].append(row)
    return found


def wrong_attempts(attempts: Attempts, open_at_backup: set[str]) -> list[str]:
    """What no history of attempts may look like, whoever asked.

    What was open when the backup was made is open again after it is restored: it may have another end, not another
    bill.
    """
    wrong = []
    for request_id, rows in attempts.items():
        if sum(row.billable for row in rows) > 1:
            wrong.append(f"{request_id} is billed twice: {rows}")
        ended = any(row.outcome in ("completed", "cancelled", "expired") for row in rows[:-1])
        if ended and request_id not in open_at_backup:
            wrong.append(f"{request_id} went on after its end: {[row.outcome for row in rows]}")
        for row in rows:
            if row.billable and row.outcome not in ("completed", "cancelled"):
                wrong.append(f"{request_id} is billed though it {row.outcome}")
            if row.billable and any(fault in row.error_message for fault in SERVICE_FAULTS):
                wrong.append(f"{request_id} is billed for our failure: {row.error_message}")
    return wrong


def wrong_bills(line: list[Request], attempts: Attempts, restores: list[tuple[float, float]]) -> list[str]:
    """What callers are billed and should not be, or the other way round.

    Of what was open or asked again around a restore the bus has forgotten: its end may be missing in the ledger, and
    its idempotency key may name a second run.
    """
    by_name = _by_name(attempts)
    wrong: list[str] = []
    known: set[str] = set()
    unheard = 0
    for request in line:
        ids = request.ids | by_name[request.name]
        known |= ids
        billed = [row for request_id in ids for row in attempts.get(request_id, []) if row.billable]
        unheard += request.over_bus and any(not call.request_id for call in request.calls)
        wrong += _wrong_bill(request, billed, may_be_lost=_around(request, restores))
    strangers = [
        request_id for request_id in attempts.keys() - known if any(row.billable for row in attempts[request_id])
    ]
    if len(strangers) > unheard:
        wrong.append(
            f"{len(strangers)} requests are billed of which no caller knows, and {unheard} tries were not answered"
        )
    print(f"billed: {sum(row.billable for rows in attempts.values() for row in rows)} requests")
    print(f"open or asked again around a restore: {sum(_around(request, restores) for request in line)} requests")
    return wrong


def _wrong_bill(request: Request, billed: list[Attempt], *, may_be_lost: bool) -> list[str]:
    call = request.call
    assert call is not None
    about = f"request {request.number} ({call.story()})"
    limit = 1 if request.key else 1 + sum(bool(each.broke) or _undelivered(each) for each in request.calls[:-1])
    limit += may_be_lost  # A restore forgets the keys of what ended after the backup.
    if len(billed) > limit:
        tries = "; ".join(f"{each.asked_at:.1f}: {each.story()}" for each in request.calls)
        return [f"{about} is billed {len(billed)} times: {billed}; its tries: {tries}"]
    if call.complete and not billed:
        return [] if may_be_lost else [f"{about} was answered and is not billed"]
    wrong = []
    for row in billed:
        whole = row.outcome == "completed"
        if row.completion_tokens > len(request.tokens) or (whole and row.completion_tokens != len(request.tokens)):
            wrong.append(f"{about} of {len(request.tokens)} tokens is billed for {row}")
        seen = _seen(request) if isinstance(call, Call) and row.request_id == call.request_id else 0
        if not whole and row.completion_tokens < seen:
            wrong.append(f"{about} has seen {seen} tokens and is billed for {row}")
    return wrong


def _undelivered(call: Call | BusCall) -> bool:
    """Whether its gateway was away from the bus for so long that it gave up; there may be an answer all the same."""
    return isinstance(call, Call) and any("schedules this model cannot be reached" in data for data in call.data)


def _seen(request: Request) -> int:
    """Whole tokens of the script that the caller has read."""
    call = request.call
    return call.text.count(" ") if call is not None else 0


def _by_name(attempts: Attempts) -> dict[str, set[str]]:
    """Ids by the name that the caller gave over HTTP: also of those whose answer never came."""
    by_name: dict[str, set[str]] = defaultdict(set)
    for request_id, rows in attempts.items():
        for row in rows:
            if row.client_request_id:
                by_name[row.client_request_id].add(request_id)
    return by_name


def ids_around(line: list[Request], attempts: Attempts, times: list[tuple[float, float]]) -> set[str]:
    """Ids of the requests that were open at one of the times."""
    by_name = _by_name(attempts)
    return {rid for request in line if _around(request, times) for rid in request.ids | by_name[request.name]}


def _around(request: Request, restores: list[tuple[float, float]]) -> bool:
    return any(began <= request.ended_at and request.calls[0].asked_at <= ended for began, ended in restores)

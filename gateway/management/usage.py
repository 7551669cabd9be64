"""What was used: ``/v1/usage`` for the caller's own tenant, ``/admin/v1/usage`` for all, and the page ``/usage``.

A caller's tenant is its key's: it stands in the subject that the ledger is asked on, and no parameter changes it.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contracts import clock, instants, subjects
from contracts.bus import Bus, Unavailable
from contracts.errors import HeadraceError
from contracts.messages.usage import (
    USAGE_FIGURES,
    LatencyAnswer,
    LatencyDimension,
    LatencyQuery,
    LatencyRow,
    UsageAnswer,
    UsageDimension,
    UsageQuery,
    UsageRow,
)
from gateway.intake.auth import Directory

PAGE = Path(__file__).parents[1] / "http" / "static" / "usage.html"
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

TIMEOUT_S = 35.0
"""Longer than a ledger lets a question take."""
LIMIT = 1000
LIMIT_MAX = 10_000
OFFSET_MAX = 10_000_000

SPANS = ("queue_wait_ms", "first_token_ms", "inter_token_ms", "end_to_end_ms")
PARAMETERS = {"by", "from", "to", "limit", "after", "tenant"}

A = TypeVar("A", UsageAnswer, LatencyAnswer)


class Usage:
    """The routes about usage."""

    def __init__(self, directory: Directory, bus: Bus) -> None:
        self._directory = directory
        self._bus = bus
        self._page = PAGE.read_bytes()

    def routes(self) -> list[Route]:
        return [
            Route("/v1/usage", self.usage, methods=["GET"]),
            Route("/v1/usage/latency", self.latency, methods=["GET"]),
            Route("/admin/v1/usage", self.usage, methods=["GET"]),
            Route("/admin/v1/usage/latency", self.latency, methods=["GET"]),
            Route("/usage", self.page, methods=["GET"]),
        ]

    async def page(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    async def usage(self, request: Request) -> Response:
        tenant = self._scope(request)
        asked = _Asked(request.query_params, get_args(UsageDimension), ("day", "model", "version"))
        answer = await self._ask("usage", UsageQuery(**asked.fields, tenant=tenant), UsageAnswer)
        return asked.answered(answer, answer.rows, USAGE_FIGURES, {"currency": answer.currency})

    async def latency(self, request: Request) -> Response:
        tenant = self._scope(request)
        asked = _Asked(request.query_params, get_args(LatencyDimension), ("model",))
        answer = await self._ask("latency", LatencyQuery(**asked.fields, tenant=tenant), LatencyAnswer)
        return asked.answered(answer, answer.rows, SPANS, {})

    def _scope(self, request: Request) -> str | None:
        """The tenant that the answer is about; None for all. Raises HeadraceError."""
        identity = self._directory.authenticate(request.scope["headers"])
        if not request.scope["path"].startswith("/admin/"):
            return identity.tenant.name
        if not identity.admin:
            raise HeadraceError("permission_denied", "This needs an admin key.")
        if unknown := sorted(set(request.query_params) - PARAMETERS):
            raise HeadraceError("invalid_request", f"There is no parameter {unknown[0]!r}.", param=unknown[0])
        return request.query_params.get("tenant")

    async def _ask(self, question: str, query: UsageQuery | LatencyQuery, kind: type[A]) -> A:
        try:
            subject = (
                subjects.usage_all(question) if query.tenant is None else subjects.usage_of(query.tenant, question)
            )
        except subjects.InvalidName as error:
            raise HeadraceError("invalid_request", f"No such tenant: {error}.", param="tenant") from error
        try:
            data = await self._bus.request(subject, msgspec.json.encode(query), timeout_s=TIMEOUT_S)
            answer = msgspec.json.decode(data, type=kind)
        except (Unavailable, msgspec.MsgspecError) as error:
            raise HeadraceError("unavailable", "The ledger does not answer.", retry_after_s=5) from error
        if answer.code == "invalid_request":
            raise HeadraceError("invalid_request", f"{answer.error}.")
        if answer.error:
            raise HeadraceError("unavailable", f"The ledger says: {answer.error}.", retry_after_s=5)
        return answer


class _Asked:
    """The parameters of one question; raises HeadraceError for what is wrong with them."""

    def __init__(self, given: QueryParams, dimensions: Sequence[str], default: Sequence[str]) -> None:
        self.by = list(_dimensions(given.getlist("by"), dimensions) or default)
        self.from_ms, self.to_ms = _range(given)
        self.offset = _number(given, "after", 0, 0, OFFSET_MAX)
        self.fields: dict[str, Any] = {
            "from_at_ms": self.from_ms,
            "to_at_ms": self.to_ms,
            "by": self.by,
            "limit": _number(given, "limit", LIMIT, 1, LIMIT_MAX),
            "offset": self.offset,
        }

    def answered(
        self,
        answer: UsageAnswer | LatencyAnswer,
        rows: Sequence[UsageRow] | Sequence[LatencyRow],
        figures: Sequence[str],
        more: dict[str, object],
    ) -> Response:
        names = (*self.by, *figures)
        content = {
            "object": "list",
            "from": _shown(self.from_ms),
            "to": _shown(self.to_ms),
            **more,
            "data": [{name: getattr(row, name) for name in names} for row in rows],
            "has_more": answer.has_more,
            "next": str(self.offset + len(rows)) if answer.has_more else None,
        }
        return Response(msgspec.json.encode(content), media_type="application/json")


def _dimensions(given: Sequence[str], known: Sequence[str]) -> list[str]:
    """From ``by=day&by=model`` or ``by=day,model``."""
    names = [name.strip() for part in given for name in part.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise HeadraceError("invalid_request", f"'by' takes {', '.join(known)}, not {name[:50]!r}.", param="by")
    return list(dict.fromkeys(names))


def _range(given: QueryParams) -> tuple[int, int]:
    """[from, to). Without both the current UTC month; with one alone, the rest of that one's month."""
    found: dict[str, int] = {}
    for name in ("from", "to"):
        if (text := given.get(name)) is None:
            continue
        try:
            found[name] = instants.parse(text)
        except ValueError as error:
            raise HeadraceError("invalid_request", f"'{name}': {error}.", param=name) from error
        if found[name] < 0:
            raise HeadraceError("invalid_request", f"'{name}' is before 1970.", param=name)
    last = found["to"] - 1 if "to" in found else clock.now_ms()
    month = instants.month_around(max(0, found.get("from", last)))
    start, end = found.get("from", month[0]), found.get("to", month[1])
    if start >= end:
        raise HeadraceError(
            "invalid_request",
            "The range is empty or reversed: 'from' is its first instant, 'to' the first that is left out.",
            param="to",
        )
    return start, end


def _number(given: QueryParams, name: str, default: int, low: int, high: int) -> int:
    text = given.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and low <= int(text) <= high):
        raise HeadraceError("invalid_request", f"'{name}' is a whole number from {low} to {high}.", param=name)
    return int(text)


def _shown(at_ms: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_ms // 1000)) + f".{at_ms % 1000:03d}Z"

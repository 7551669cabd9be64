"""What the service says about itself: pages to chat on and about usage; OpenAPI and AsyncAPI, as JSON and as pages."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from contracts import asyncapi
from gateway.http import openapi
from gateway.http.typed import TypedRoute

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

router = APIRouter(tags=[openapi.PUBLIC], route_class=TypedRoute)


def _page(file: str) -> Callable[[], Awaitable[HTMLResponse]]:
    text = (STATIC / file).read_bytes()

    async def show() -> HTMLResponse:
        return HTMLResponse(text, headers=HEADERS)

    return show


for path, file, summary in (
    ("/", "index.html", "A page to chat on"),
    ("/usage", "usage.html", "A page about usage"),
    ("/docs", "reference.html", "This document, readable"),
    ("/asyncapi", "reference.html", "The bus, readable"),
):
    router.add_api_route(path, _page(file), methods=["GET"], summary=summary, response_class=HTMLResponse)


@router.get("/openapi.json")
async def http(request: Request) -> dict[str, Any]:
    """This document."""
    return openapi.document(request.app)


@router.get("/asyncapi.json")
async def bus() -> dict[str, Any]:
    """The bus as an AsyncAPI document."""
    return asyncapi.document()

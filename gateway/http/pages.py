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

public, private, documents = (APIRouter(tags=[openapi.PUBLIC], route_class=TypedRoute) for _ in range(3))


def _page(file: str) -> Callable[[], Awaitable[HTMLResponse]]:
    text = (STATIC / file).read_bytes()

    async def show() -> HTMLResponse:
        return HTMLResponse(text, headers=HEADERS)

    return show


for router, path, file, summary in (
    (public, "/", "index.html", "A page to chat on"),
    (public, "/usage", "usage.html", "A page about a tenant's usage"),
    (private, "/admin/usage", "usage.html", "A page about all tenants' usage"),
    (documents, "/docs", "reference.html", "This document, readable"),
    (documents, "/asyncapi", "reference.html", "The bus, readable"),
):
    router.add_api_route(path, _page(file), methods=["GET"], summary=summary, response_class=HTMLResponse)


@documents.get("/openapi.json")
async def http(request: Request) -> dict[str, Any]:
    """This document."""
    return openapi.document(request.app)


@documents.get("/asyncapi.json")
async def bus() -> dict[str, Any]:
    """The bus as an AsyncAPI document."""
    return asyncapi.document()

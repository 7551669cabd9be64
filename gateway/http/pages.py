"""What the service shows of itself: pages to chat, about usage, the console; OpenAPI and AsyncAPI, as JSON and pages.

Every page is the one frame around a template; its script and the style sheet are files under ``/static``.
"""

from collections.abc import Awaitable, Callable
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from contracts import asyncapi
from gateway.http import openapi
from gateway.http.typed import TypedRoute

STATIC = Path(__file__).parent / "static"
TEMPLATES = Path(__file__).parent / "templates"
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""Nothing inline, nothing from elsewhere, and no text becomes HTML (trusted types)."""

_DOCUMENTS = (("/docs", "API", "reference"), ("/asyncapi", "Bus", "reference"))
_PUBLIC = (("/", "Chat", "chat"), ("/usage", "Usage", "usage"), *_DOCUMENTS)
_PRIVATE = (("/console", "Console", "console"), ("/admin/usage", "Usage", "usage"), *_DOCUMENTS)
"""Pages of each listener: where, what its link says, which template and script."""
_SUMMARIES = {
    "/": "A page to chat on",
    "/usage": "A page about a tenant's usage",
    "/console": "A page on which operators see and change what runs",
    "/admin/usage": "A page about all tenants' usage",
    "/docs": "This document, readable",
    "/asyncapi": "The bus, readable",
}

_frame = Template((TEMPLATES / "frame.html").read_text("utf-8"))


def _page(pages: tuple[tuple[str, str, str], ...], at: str) -> Callable[[], Awaitable[HTMLResponse]]:
    title, page = next((title, page) for path, title, page in pages if path == at)
    links = "".join(
        f'<a href="{path}"{" aria-current=page" if path == at else ""}>{escape(each)}</a>' for path, each, _ in pages
    )
    content = (TEMPLATES / f"{page}.html").read_text("utf-8")
    text = _frame.substitute(title=title.lower(), page=page, links=links, content=content)

    async def show() -> HTMLResponse:
        return HTMLResponse(text, headers=HEADERS)

    return show


def _router(pages: tuple[tuple[str, str, str], ...]) -> APIRouter:
    router = APIRouter(tags=[openapi.PUBLIC], route_class=TypedRoute)
    for path, *_ in pages:
        shown = _page(pages, path)
        router.add_api_route(path, shown, methods=["GET"], summary=_SUMMARIES[path], response_class=HTMLResponse)
    return router


public, private = _router(_PUBLIC), _router(_PRIVATE)
documents = APIRouter(tags=[openapi.PUBLIC], route_class=TypedRoute)


@documents.get("/openapi.json")
async def http(request: Request) -> dict[str, Any]:
    """This document."""
    return openapi.document(request.app)


@documents.get("/asyncapi.json")
async def bus() -> dict[str, Any]:
    """The bus as an AsyncAPI document."""
    return asyncapi.document()


_files = StaticFiles(directory=STATIC)


async def files(scope: Scope, receive: Receive, send: Send) -> None:
    """Scripts, the style sheet and the icon, for all pages; asked for again each time, and answered with 304."""

    async def headed(message: Any) -> None:
        if message["type"] == "http.response.start":
            added = [(b"cache-control", b"no-cache"), (b"x-content-type-options", b"nosniff")]
            message = {**message, "headers": [*message.get("headers", ()), *added]}
        await send(message)

    await _files(scope, receive, headed)

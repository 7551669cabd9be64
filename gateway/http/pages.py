"""What the service says about itself: OpenAPI of the HTTP side, AsyncAPI of the bus, each as JSON and as a page."""

from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from contracts import asyncapi
from gateway.http import openapi
from gateway.management.usage import PAGE_HEADERS

PAGE = Path(__file__).parent / "static" / "reference.html"


def routes() -> list[Route]:
    page = PAGE.read_bytes()

    async def show(request: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    async def http(request: Request) -> Response:
        return Response(msgspec.json.encode(openapi.document()), media_type="application/json")

    async def bus(request: Request) -> Response:
        return Response(msgspec.json.encode(asyncapi.document()), media_type="application/json")

    return [
        Route("/docs", show, methods=["GET"]),
        Route("/asyncapi", show, methods=["GET"]),
        Route("/openapi.json", http, methods=["GET"]),
        Route("/asyncapi.json", bus, methods=["GET"]),
    ]

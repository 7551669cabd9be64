"""Whether a process of the stack is ready, asked from outside: empty when it is, else why not."""

import asyncio
import http.client
import json
import ssl
from urllib.parse import urlsplit

TIMEOUT_S = 5.0
"""For one exchange on this machine; a guess."""


async def http_reason(url: str, path: str = "/health/ready") -> str:
    """Empty when ``path`` of the service at ``url`` answers 200, else its answer's text; raises OSError."""
    return await asyncio.to_thread(_http_reason, url, path)


def _http_reason(url: str, path: str) -> str:
    address = urlsplit(url)
    host, port = address.hostname or "", address.port
    connection = (
        http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=_unverified())
        if address.scheme == "https"
        else http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    )
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return "" if answer.status == http.client.OK else _message(answer.read(4096)) or "not ready"
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP at {url}: {error!r}") from error
    finally:
        connection.close()


def _unverified() -> ssl.SSLContext:
    """For a probe of our own process: whom its certificate names does not matter."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _message(body: bytes) -> str:
    """The message of an OpenAI error body, or the body as it stands."""
    text = body.decode(errors="replace").strip()
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text


async def nats_reason(host: str, port: int) -> str:
    """Empty when a NATS server with JetStream greets at the address; raises OSError or EOFError."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        greeting = await reader.readuntil(b"\r\n")
        return "" if b'"jetstream":true' in greeting else "JetStream is off"
    finally:
        writer.close()

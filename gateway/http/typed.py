"""FastAPI's typed routes for msgspec structs: a handler's signature says what a route takes and gives.

Bodies are read within the edge's bounds, answers are encoded with every field. What the signatures say is also what
the OpenAPI document says (``gateway.http.openapi``).
"""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Generic, Literal, TypeVar, get_type_hints

import msgspec
from fastapi import Depends, Path, Request, Response
from fastapi.routing import APIRoute

from contracts import whole_numbers
from contracts.bus import Bus
from contracts.errors import HeadraceError
from contracts.messages.records import Scope
from gateway.apis import fields
from gateway.apis.response_format import one_line
from gateway.config import GatewayConfig
from gateway.http import body
from gateway.http.exchange import Exchange
from gateway.intake.admission import Intake
from gateway.intake.auth import Directory, Identity
from gateway.intake.catalog import Catalog
from gateway.intake.turnstile import Turnstile
from gateway.live import Live

T = TypeVar("T")


class Services(msgspec.Struct, frozen=True, kw_only=True):
    """What handlers work with: ``app.state.services``."""

    config: GatewayConfig
    bus: Bus
    directory: Directory
    catalog: Catalog
    intake: Intake
    turnstile: Turnstile
    live: Live
    not_ready: Callable[[], str]
    """The reason why the gateway is not ready, or an empty text."""


class Listed(msgspec.Struct, Generic[T]):
    """A list as OpenAI has it."""

    data: list[T]
    object: Literal["list"] = "list"


async def services_of(request: Request) -> Services:
    """What the application was built with."""
    found: Services = request.app.state.services
    return found


Name = Annotated[str, Path(min_length=1)]
ServicesDep = Annotated[Services, Depends(services_of)]


def caller_for(scope: Scope | None) -> Callable[[Request, Services], Awaitable[Identity]]:
    """Dependency: the caller, whose key is for ``scope``. Raises HeadraceError as ``Directory.authenticate`` does."""

    async def judged(request: Request, services: ServicesDep) -> Identity:
        exchange: Exchange = request.scope["headrace"]
        identity = services.directory.authenticate(exchange.scope["headers"], exchange.address, scope)
        exchange.tenant = identity.tenant.name
        if "inference" in identity.scopes:
            exchange.rate_limits = functools.partial(services.intake.rate_limits, identity.tenant, "")
        return identity

    return judged


CallerDep = Annotated[Identity, Depends(caller_for(None))]
"""With any valid key."""


class BodyReader:
    """Dependency: the request's body as ``kind``, or its bytes, of which ``kind`` is only the description."""

    def __init__(self, kind: type[msgspec.Struct], *, raw: bool = False) -> None:
        self.kind = kind
        self._raw = raw

    async def __call__(self, request: Request, services: ServicesDep) -> Any:
        data = await body.read(request.scope["headrace"], services.config)
        if self._raw:
            return data
        try:
            return whole_numbers.convert(msgspec.json.decode(data), self.kind)
        except msgspec.ValidationError as error:
            raise fields.invalid(error) from error
        except (msgspec.DecodeError, RecursionError) as error:
            raise HeadraceError("invalid_json", f"The body is not JSON: {error}") from error


class TypedRoute(APIRoute):
    """A route whose answer is what the handler's return annotation says: a msgspec type, or a Response of its own.

    The first line of the handler's docstring is the summary.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self.answer = get_type_hints(endpoint)["return"]

        @functools.wraps(endpoint)
        async def answered(*args: Any, **kwargs: Any) -> Response:
            answer = await endpoint(*args, **kwargs)
            if isinstance(answer, Response):
                return answer
            content = one_line(msgspec.json.encode(whole(answer)))
            return Response(content, self.status_code or 200, media_type="application/json")

        summary, _, answered.__doc__ = (inspect.getdoc(endpoint) or "").partition("\n\n")
        options["summary"] = options["summary"] or summary.rstrip(".")
        options["response_model"] = None
        [method] = options["methods"]
        options["operation_id"] = operation_id(method, path)
        super().__init__(path, answered, **options)

    @property
    def body(self) -> type[msgspec.Struct] | None:
        """What the route takes as its body."""
        readers = (found.call for found in self.dependant.dependencies)
        return next((reader.kind for reader in readers if isinstance(reader, BodyReader)), None)


def operation_id(method: str, path: str) -> str:
    """Of an operation in the OpenAPI document."""
    words = [part.strip("{}").removesuffix(":path") for part in path.split("/") if part]
    return "_".join([method.lower(), *(words or ["page"])]).replace(".", "_")


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """FastAPI's ``responses`` for the refusals of a route; the OpenAPI document fills in what they look like."""
    return {status: {} for status in statuses}


def whole(value: Any) -> Any:
    """Every field of every struct, also those that a message leaves out as being its default."""
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        return {shown: whole(getattr(value, name)) for shown, name in names}
    if isinstance(value, dict):
        return {name: whole(item) for name, item in value.items()}
    return [whole(item) for item in value] if isinstance(value, (list, tuple)) else value

"""``headrace submit``: one chat over the bus."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from compose.cli.common import DataDirOption, on_bus
from compose.stack.data_dir import ComposeError, Target
from contracts.errors import HeadraceError

if TYPE_CHECKING:
    from contracts.bus import Bus


def submit(
    text: Annotated[str, typer.Argument(help="What the user says.")],
    model: Annotated[str | None, typer.Option(show_default="the first of the registry")] = None,
    tenant: Annotated[str, typer.Option(help="Tenant that the answer is charged to.")] = "demo",
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    data_dir: DataDirOption = None,
) -> None:
    """Chat once, as an internal service does: over the bus."""
    from contracts import registry
    from contracts.client import Client

    registry.check_name("tenant name", tenant)
    limit: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}

    async def chat(bus: "Bus", target: Target) -> None:
        name = model or next((record.name for record in await registry.models(bus)), None)
        if name is None:
            raise ComposeError("there is no model in the registry")
        try:
            async with Client(target.nats_url, tenant=tenant, credentials=target.credentials) as client:
                async for chunk in client.chat(model=name, messages=[{"role": "user", "content": text}], **limit):
                    print(chunk.text, end="", flush=True)
        except HeadraceError as error:
            raise ComposeError(f"{error.message} ({error.code})") from error
        finally:
            print()

    on_bus(data_dir, chat)

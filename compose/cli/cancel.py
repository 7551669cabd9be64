"""``headrace cancel``: an operator ends a request."""

from typing import Annotated

import typer

from compose.cli.common import DataDirOption, JsonOption, administer, on_bus, show
from compose.stack.data_dir import ComposeError


def cancel(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="Of a request that has not ended.")],
    model: Annotated[str | None, typer.Option(help="Where it is.", show_default="looked for")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a request wherever it is; its caller is told, and nobody pays for it."""
    from contracts import operations
    from contracts.forms import RequestCancel

    where = model or on_bus(data_dir, lambda bus, _: operations.model_of_request(bus, request_id))
    if not where:
        raise ComposeError(f"no model has an open request {request_id}")
    done = administer(data_dir, lambda do: do.cancel_request(request_id, RequestCancel(model=where)))
    show(done, f"request {request_id} of {done.tenant}: {done.outcome or 'cancelled'}", as_json=as_json)

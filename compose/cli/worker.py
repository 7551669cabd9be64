"""``headrace worker``: the worker processes of the stack that runs here, changed while it runs."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from compose.cli.common import DataDirOption, JsonOption, administer, on_bus, show, table
from compose.stack import control
from compose.stack.control import WITHIN_S, WITHIN_S_MAX, WORKERS_MAX
from compose.stack.data_dir import ComposeError, DataDir, default_data_dir

if TYPE_CHECKING:
    from contracts.bus import Bus
    from contracts.messages.control import Loading

app = typer.Typer(no_args_is_help=True, help="Workers of the stack that runs here; nothing restarts.")

WithinOption = Annotated[
    float, typer.Option("--within", min=0, max=WITHIN_S_MAX, help="Seconds for what runs to end; then it is cut off.")
]


@app.command("list")
def worker_list(data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Workers and how they are; of one that fetches a version, how much of it is here."""
    answer = ask(data_dir, control.ListWorkers())
    loading: dict[str, Loading] = {}
    with suppress(ComposeError):  # Processes are shown also while the bus is away.
        loading = on_bus(data_dir, lambda bus, _: _loading(bus, answer.workers))
    _show(answer, loading, as_json=as_json)


@app.command("add")
def worker_add(
    model: Annotated[str, typer.Argument(help="A model in the registry.")],
    count: Annotated[int, typer.Option(min=1, max=WORKERS_MAX)] = 1,
    version: Annotated[str, typer.Option(show_default="the stable one", help="Of the model; for a roll-out.")] = "",
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start workers of a model; returns once they are ready."""
    _show(ask(data_dir, control.AddWorkers(model, count, version)), {}, as_json=as_json)


@app.command("remove")
def worker_remove(
    worker: Annotated[str, typer.Argument(help="Its name in the list, such as worker-1.")],
    within_s: WithinOption = WITHIN_S,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a worker: it takes nothing more, finishes what it runs, and goes."""
    _show(ask(data_dir, control.RemoveWorker(worker, within_s)), {}, as_json=as_json)


@app.command("drain")
def worker_drain(
    worker: Annotated[str, typer.Argument(help="Its process, such as worker-1, or its name on the bus.")],
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a worker take nothing more, for the life of its process; what runs there goes on to its end."""
    _hold(data_dir, worker, held=True, as_json=as_json)


@app.command("resume")
def worker_resume(
    worker: Annotated[str, typer.Argument(help="Its process, such as worker-1, or its name on the bus.")],
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a worker that was drained take work again."""
    _hold(data_dir, worker, held=False, as_json=as_json)


def _hold(data_dir: Path | None, worker: str, *, held: bool, as_json: bool) -> None:
    from contracts import operations
    from contracts.forms import WorkerChange

    model, name = on_bus(data_dir, lambda bus, _: operations.model_of_worker(bus, worker))
    done = administer(data_dir, lambda do: do.change_worker(name, WorkerChange(model=model, held=held)))
    show(done, f"worker {name} takes {'nothing more' if held else 'work again'}", as_json=as_json)


def is_local(data_dir: Path | None) -> bool:
    """Whether the command is about the stack of a data directory, and not about a bus somewhere."""
    return data_dir is not None or not os.environ.get("HEADRACE_NATS_URL")


def ask(data_dir: Path | None, call: control.Call) -> control.Answer:
    """The answer of the ``headrace up`` of that directory; raises ComposeError."""
    return control.call(DataDir(data_dir or default_data_dir(os.environ)).control, call)


async def _loading(bus: "Bus", workers: "Sequence[control.ShownWorker]") -> "dict[str, Loading]":
    """What each fetches, by its process's name, as its model's owner heard last; none where there is no owner."""
    from contracts import operations
    from contracts.bus import BusError
    from contracts.errors import HeadraceError

    found = {}
    for model in {each.model for each in workers}:
        with suppress(BusError, HeadraceError):
            for beat in (await operations.queue(bus, model)).workers:
                if beat.loading is not None:
                    found[beat.worker.rpartition("-")[0]] = beat.loading
    return found


def _show(answer: control.Answer, loading: "dict[str, Loading]", *, as_json: bool) -> None:
    for note in answer.notes:
        print(f"note: {note}", file=sys.stderr)
    rows: list[tuple[Any, ...]] = []
    for it in answer.workers:
        coming = loading.get(it.name)
        fetched = (
            f"{coming.version}: {coming.done_bytes / 1e6:,.0f} of {coming.total_bytes / 1e6:,.0f} MB" if coming else "-"
        )
        rows.append((it.name, it.model, it.version or "stable", it.state, fetched, it.pid or "-"))
    shown = [msgspec.structs.asdict(it) | {"loading": loading.get(it.name)} for it in answer.workers]
    show(shown, table(("worker", "model", "started for", "state", "fetching", "pid"), rows), as_json=as_json)

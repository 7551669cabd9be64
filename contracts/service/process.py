"""One way for all services to start, to be ready and to stop.

Decided here: logs, metrics server, signals, the connection to the bus, exit codes. Left to the service: what it does
meanwhile, and how long its graceful drain takes.
"""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import structlog
import uvloop

from contracts import ids, topology
from contracts.bus import Bus, BusError, Unavailable
from contracts.service import telemetry
from contracts.service.config import ConfigError, ServiceConfig, load

C = TypeVar("C", bound=ServiceConfig)

EXIT_STOPPED, EXIT_FAILED = 0, 1
EXIT_CONFIGURATION = 2
"""Supervisors start no process again that ended so: it would end so again."""
COLLECTED_AT_OBJECTS = 10_000
"""New objects between two looks for those that only hold each other, which ours hardly ever do; Python's 700 are
those of a few requests."""
LOST_S = 3.0
"""Once the bus is lost for good, a service has this long to tell its callers."""

_log = structlog.get_logger(__name__)


class Service(Protocol):
    """What a process runs."""

    def not_ready(self) -> str:
        """Why work would not be done now; empty when it would. Called from any thread."""

    def stop(self) -> None:
        """Begin the graceful drain, after which ``run`` returns. May be called again."""

    async def run(self) -> None:
        """Serve until ``stop``; raises what broke. The bus is connected, and has its streams and buckets."""


def run_service(
    name: str,
    kind: type[C],
    build: Callable[[C, Bus], Awaitable[Service]],
    gathered: Callable[[C], Callable[[], bytes] | None] = lambda config: None,
) -> int:
    """Run a service until SIGTERM or SIGINT; gives the process's exit code.

    ``name`` is the service's role: of its logs, and of its user on a bus that has none. ``kind`` is read from the
    environment. ``gathered`` gives what makes the metrics page of a whole stack, where this process is to have one.
    EXIT_STOPPED after a graceful drain, EXIT_FAILED when something broke or the bus was lost for good (the log says
    why), EXIT_CONFIGURATION with a line on standard error for each bad value.
    """
    try:
        config = load(kind, os.environ)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIGURATION
    telemetry.configure_logging(config, name)
    return uvloop.run(_Process(name, config, build, gathered(config)).run())


class _Process(Generic[C]):
    def __init__(
        self, name: str, config: C, build: Callable[[C, Bus], Awaitable[Service]], gathered: Callable[[], bytes] | None
    ) -> None:
        self._gathered = gathered
        self._name = name
        self._config = config
        self._build = build
        self._service: Service | None = None
        """None until the bus is connected and the service is built."""

    async def run(self) -> int:
        gc.set_threshold(COLLECTED_AT_OBJECTS)
        telemetry.serve(self._config, self._not_ready, self._gathered)
        running = asyncio.create_task(self._connect_and_serve())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, running)
        try:
            await running
        except asyncio.CancelledError:
            return EXIT_STOPPED  # by a signal, before there was a service
        except (BusError, OSError) as error:
            _log.error("service_failed", reason=str(error))
            return EXIT_FAILED
        except Exception:
            _log.exception("service_failed")
            return EXIT_FAILED
        return EXIT_STOPPED

    def _not_ready(self) -> str:
        return self._service.not_ready() if self._service else "starting"

    def _stop(self, running: asyncio.Task[None]) -> None:
        if self._service:
            self._service.stop()
        else:
            running.cancel()

    async def _connect_and_serve(self) -> None:
        credentials = self._config.credentials
        user = credentials.user or self._name
        bus = await Bus.connect(self._config.nats_url, name=ids.incarnation(user), user=user, credentials=credentials)
        serving = asyncio.create_task(self._serve(bus))
        lost = asyncio.create_task(bus.closed.wait())
        try:
            await asyncio.wait({serving, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done() and self._service:
                self._service.stop()
                await asyncio.wait({serving}, timeout=LOST_S)
            if lost.done():
                raise Unavailable("the bus is lost for good")
            await serving
        finally:
            lost.cancel()
            serving.cancel()
            await asyncio.wait({serving, lost})
            await bus.close()

    async def _serve(self, bus: Bus) -> None:
        for difference in await topology.ensure(bus):
            _log.warning("topology_drift", difference=difference)
        self._service = await self._build(self._config, bus)
        await self._service.run()

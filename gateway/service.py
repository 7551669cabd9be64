"""One gateway process: what starts, in which order, and how it ends."""

import asyncio
import gc

import structlog

from contracts import ids, subjects
from contracts.bus import Bus
from contracts.keys import Peppers
from contracts.messages.frames import ErrorData
from contracts.service.vitals import Vitals
from gateway.config import GatewayConfig
from gateway.deliveries import DeliveryReports
from gateway.http import routes, server
from gateway.http.inference import Inference
from gateway.http.refusals import Refusals
from gateway.http.typed import Services
from gateway.intake.activity import Activity, Reporter
from gateway.intake.admission import Intake
from gateway.intake.auth import Directory
from gateway.intake.bus_submit import NatsIngress
from gateway.intake.catalog import Catalog
from gateway.intake.shedding import Shedding
from gateway.intake.turnstile import Turnstile
from gateway.live import Live
from gateway.management import admin, operations, usage
from gateway.management.readiness import Readiness
from gateway.streams.hub import Hub

_log = structlog.get_logger()

LAST_EVENTS_S = 1.0
"""After the grace time the last error events are written within this."""


class Gateway:
    """``run`` serves until ``stop`` is called."""

    def __init__(self, config: GatewayConfig, bus: Bus) -> None:
        self.config = config
        self._bus = bus
        self._stopping = asyncio.Event()
        self.addresses: list[str] = []
        """Where it listens, once it serves."""
        self.admin_addresses: list[str] = []
        """Where the admin API is."""
        activity = Activity()
        self._reporter = Reporter(bus, activity)
        self._deliveries = DeliveryReports(bus)
        self._directory = Directory(Peppers.parse(config.pepper), activity)
        self._catalog = Catalog(config.cache)
        self._vitals = Vitals(bus, late_s=config.shed_lag_s)
        self._hub = Hub(
            bus, self._vitals, ids.incarnation(bus.user), hold_s=config.hold_s, bytes_max=config.stream_bytes_max
        )
        intake = Intake(
            bus,
            self._catalog,
            self._hub.cancel_request,
            body_bytes_max=config.body_bytes_max,
            claim_check_bytes=config.claim_check_bytes,
            ask_s_max=config.admit_s_max,
        )
        turnstile = Turnstile()
        shedding = Shedding(self._vitals, turnstile)
        self._refusals = Refusals(shedding, config.cors_origins)
        self._live = Live(bus, self._catalog, self._hub.incarnation)
        self._readiness = Readiness(
            bus, self._catalog, self._live, shedding, subjects.gateway_stream_owner(self._hub.incarnation)
        )
        self._ingress = NatsIngress(bus, self._directory, intake, shedding, turnstile, self._deliveries)
        self._services = Services(
            config=config,
            bus=bus,
            directory=self._directory,
            catalog=self._catalog,
            intake=intake,
            turnstile=turnstile,
            live=self._live,
            not_ready=self._readiness.not_ready,
        )
        self._inference = Inference(self._services, self._hub, self._deliveries)

    def not_ready(self) -> str:
        """The reason why no request should come here, or an empty text."""
        return self._readiness.not_ready()

    def stop(self) -> None:
        """Begin the graceful drain, after which ``run`` ends; called by a signal."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve; when it returns, everything that was begun has ended."""
        public, private = server.listen(self.config.listen), server.listen(self.config.admin_listen)
        callers = server.Server(
            routes.public(self._services, self._inference, (usage.own,)), public, self.config, self._refusals.of
        )
        administration = (usage.everyones, admin.router, operations.router)
        operators = server.Server(routes.private(self._services, administration), private, self.config)
        await self._vitals.start()  # What it takes to build all that is no lag.
        await self._directory.start(self._bus)
        await self._catalog.start(self._bus)
        await self._hub.start()
        await self._ingress.start()
        self._readiness.start()
        self._reporter.start()
        self._deliveries.start()
        gc.freeze()  # What stands so far is never looked at again: a full collection would pause streams for 30 ms.
        for each in (callers, operators):
            each.start()
        self.addresses, self.admin_addresses = callers.addresses, operators.addresses
        _log.info(
            "gateway_started", incarnation=self._hub.incarnation, listen=self.addresses, admin=self.admin_addresses
        )
        await self._stopping.wait()
        await self._drain()
        await asyncio.gather(callers.close(), operators.close())
        await self._close()

    async def _drain(self) -> None:
        """Refuse what is new; give running requests their grace time; end the rest with an error."""
        self._readiness.draining = True
        self._inference.draining = True
        self._live.close()
        await self._ingress.close()
        if not self._bus.closed.is_set() and await self._inference.finished(self.config.grace_s):
            _log.info("gateway_drained")
            return
        _log.warning("gateway_drained", cut_off=len(self._hub))
        self._hub.fail_all(
            ErrorData(code="shutting_down", message="The server shut down before the answer was complete."), "shutdown"
        )
        await self._inference.finished(LAST_EVENTS_S)

    async def _close(self) -> None:
        await self._readiness.close()
        await self._reporter.close()
        await self._deliveries.close()
        await self._hub.close()
        await self._catalog.close()
        await self._directory.close()
        await self._vitals.close()

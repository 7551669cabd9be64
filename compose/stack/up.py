"""``headrace up``: the whole system on one machine, kept up until it is told to stop.

Decides what runs with which settings; compose.stack.processes keeps it running. Order: NATS, topology and records,
then all services at once; ``run.json`` once a request would be served. Topology and records are entered once more in
each later life of NATS, which may have lost its store.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from compose.stack import nats_config, tenant_users
from compose.stack.autoscale import Autoscaler
from compose.stack.changes import Changes
from compose.stack.control import ControlServer
from compose.stack.data_dir import (
    ROLES,
    ComposeError,
    DataDir,
    Options,
    Role,
    Run,
    Secrets,
    read_peppers,
    write_private,
)
from compose.stack.greeting import Greeting
from compose.stack.manifest import make_manifest
from compose.stack.nats_system import Servers
from compose.stack.ports import Ports
from compose.stack.probes import http_reason, nats_reason
from compose.stack.processes import Child, Probe, Spec, Supervisor
from compose.stack.records import operator
from compose.stack.seeds import SYSTEM, Seeds
from compose.stack.terminal import Terminal, quiet_logs
from compose.stack.workers import Workers
from contracts import operations, registry, topology
from contracts.administration import Administration
from contracts.bus import Bus, BusError, Credentials
from contracts.errors import HeadraceError
from contracts.forms import ModelChange, NewKey, NewTenant
from contracts.keys import ADMIN_SCOPES
from contracts.messages.records import Manifest
from contracts.permissions import OPERATOR

START_LIMIT_S = 900.0
"""Until everything is ready; a cold disk and a large model take minutes. A guess."""
LOOK_S = 0.05
RESTORE_S = 1.0
"""Between two tries to enter the records again."""
GRACE_S: dict[Role, float] = {"gateway": 35.0, "worker": 35.0, "scheduler": 5.0, "ledger": 15.0, "nats": 5.0}
"""In the order in which they are stopped; longer than what the services give themselves to drain."""
DEMO_TENANT = "demo"
SQL_USER = "analyst"
ADMIN_TENANT = "admin"
_SECRETS = {"HEADRACE_NATS_URL", "HEADRACE_PEPPER", "HEADRACE_CLICKHOUSE_URL", "HEADRACE_SQL_PASSWORD"}


def run(options: Options, data_dir: Path) -> int:
    """Start, keep up, stop. The exit status: 0 after a signal, 1 when the stack cannot be kept up."""
    quiet_logs()
    terminal = Terminal()
    directory = DataDir(data_dir)
    for line in directory.prepare():
        terminal.say(f"note: {line}")
    lock = directory.lock()
    try:
        directory.remove_run()
        ports = Ports()
        shared = ports.take(options.host, options.port, shared=True)
        admin = ports.take("127.0.0.1", options.admin_port, shared=True, option="--admin-port")
        manifests = [make_manifest(options.engine, name, options.sim_context) for name in options.models]
        if len({manifest.name for manifest in manifests}) < len(manifests):
            raise ComposeError("two of the models have the same name")
        return asyncio.run(
            _run(partial(Stack, options, directory, ports, (shared, admin), manifests, terminal), terminal)
        )
    finally:
        os.close(lock)


def _without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what the services read from files here: to be told twice is an error."""
    return {name: value for name, value in environment.items() if name not in _SECRETS}


async def _run(make: "Callable[[], Stack]", terminal: Terminal) -> int:
    stack = make()
    stopping = asyncio.Event()

    def interrupted() -> None:
        if stopping.is_set():
            stack.supervisor.hurry.set()
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, interrupted)
    life = asyncio.create_task(stack.live())
    asked = asyncio.create_task(stopping.wait())
    await asyncio.wait([life, asked], return_when=asyncio.FIRST_COMPLETED)
    stopping.set()
    life.cancel()
    problem = (await asyncio.gather(life, return_exceptions=True))[0]
    failed = not isinstance(problem, asyncio.CancelledError)
    terminal.show("")
    terminal.say(f"{problem}; stopping everything" if failed else "stopping (Ctrl-C again: at once)")
    await stack.stop()
    if problem is not None and not isinstance(problem, (asyncio.CancelledError, ComposeError)):
        raise problem
    terminal.say("stopped")
    return 1 if failed else 0


def _is_worker(child: Child) -> bool:
    return child.spec.role == "worker"


async def _await_worker(bus: Bus, shard: str) -> None:
    """Until the shard's owner knows of a worker that is ready."""
    while True:
        with suppress(BusError, HeadraceError):
            if any(worker.state == "ready" for worker in (await operations.shard_queue(bus, shard)).workers):
                return
        await asyncio.sleep(LOOK_S)


class Stack:
    """The processes of one ``headrace up`` and where they are reached."""

    def __init__(
        self,
        options: Options,
        directory: DataDir,
        ports: Ports,
        shared_ports: tuple[int, int],
        manifests: list[Manifest],
        terminal: Terminal,
    ) -> None:
        self.supervisor = Supervisor(
            restarted=self._restarted, say=terminal.say, dispensable=lambda child: self._served and _is_worker(child)
        )
        self._workers = Workers(options, self.supervisor, partial(self._add_service, "worker"))
        changes = Changes(
            self._workers,
            self.supervisor,
            bus=self._bus,
            admit=self._admit,
            changed=self._write_run,
            forget=self._forget_model,
        )
        self._control = ControlServer(directory.control, changes.perform)
        self._changes = changes
        self._options = options
        self._directory = directory
        self._ports = ports
        self._port, self._admin_port = shared_ports
        self._manifests = manifests
        self._terminal = terminal
        self._secrets: Secrets = directory.secrets()
        self._nats = options.nats_url
        self._seeds = Seeds(directory.seeds)
        self._sql = ""
        self._gateway_ports = [ports.free(shared=True) for _ in range(options.gateways)]
        self._served = False
        self._restoring: asyncio.Task[None] | None = None
        self._following: asyncio.Task[NoReturn] | None = None
        self._autoscaling: asyncio.Task[None] | None = None

    async def live(self) -> NoReturn:
        """Start everything and stay until something cannot be kept up; raises ComposeError then."""
        started_s = time.monotonic()
        starting = asyncio.create_task(self._start())
        try:
            ends: list[asyncio.Future[Any]] = [starting, self.supervisor.failed]
            await asyncio.wait(ends, timeout=START_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                self._served = True
                self._autoscale()
                await self._control.start()
                if self._sql:
                    self._directory.write_sql(f"http://{self._sql}", SQL_USER, self._secrets.sql_password)
                self._write_run()
                self._greet(time.monotonic() - started_s)
            elif not self.supervisor.failed.done():
                raise ComposeError(f"not ready within {START_LIMIT_S:g} s: {self._waiting_for()}")
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        raise ComposeError(await asyncio.shield(self.supervisor.failed))

    async def stop(self) -> None:
        self._served = False
        await self._control.close()
        self._directory.remove_run()
        for task in (self._restoring, self._following, self._autoscaling):
            if task:
                task.cancel()
        await self.supervisor.stop(tuple(GRACE_S))
        self._ports.close()

    def _autoscale(self) -> None:
        if self._options.autoscale is None:
            return
        scaler = Autoscaler(
            self._options.autoscale,
            self._workers,
            self._changes,
            bus=self._bus,
            models=lambda: [manifest.name for manifest in self._manifests],
            say=self._terminal.say,
        )
        self._autoscaling = asyncio.create_task(scaler.run())

    async def _start(self) -> None:
        if not self._options.nats_url:
            await self.supervisor.wait_ready([self._add_nats()])
        await self._keep_records()
        if not self._options.nats_url:
            following = tenant_users.keep_following(
                self._nats, self._credentials, self._seeds, self._directory.nats, self._terminal.say
            )
            self._following = asyncio.create_task(following)
        for index in range(self._options.schedulers):
            self._add_service("scheduler", index, {"HEADRACE_PEPPER_FILE": str(self._directory.pepper)})
        await self._start_workers()
        for index, port in enumerate(self._gateway_ports):
            self._add_gateway(index, port)
        clickhouse = self._options.clickhouse_url or f"chdb://{self._directory.ledger}"
        clickhouse_file = self._directory.secret_file("clickhouse-url", clickhouse)
        self._add_service("ledger", 0, {"HEADRACE_CLICKHOUSE_URL_FILE": clickhouse_file, **self._sql_endpoint()})
        await self._wait_ready()

    async def _start_workers(self) -> None:
        """As many as was asked for; of a model with shards one of each at least."""
        async with self._bus() as bus:
            names = [await operations.shard_names(bus, manifest.name) for manifest in self._manifests]
        counts = [max(count, len(each)) for count, each in zip(self._options.workers, names, strict=True)]
        if sum(counts) > sum(self._options.workers):
            await self._admit([self._workers.user(ahead) for ahead in range(sum(counts))])
        for each, count in zip(names, counts, strict=True):
            for number in range(count):
                self._workers.add(each[number % len(each)])

    async def _wait_ready(self) -> None:
        """Until every model is served; shows what is waited for once it takes longer than people expect."""
        waiting = asyncio.create_task(self._every_model_served())
        shown = ""
        try:
            while not (await asyncio.wait([waiting], timeout=1.0))[0]:
                if (reasons := self._waiting_for()) != shown:
                    self._terminal.show(f"waiting for {reasons}")
                    shown = reasons
        finally:
            waiting.cancel()
            self._terminal.show("")

    async def _every_model_served(self) -> None:
        await self.supervisor.wait_ready(self.supervisor.children)
        async with self._bus() as bus:
            for manifest in self._manifests:
                for shard in await operations.shard_names(bus, manifest.name):
                    await _await_worker(bus, shard)

    def _waiting_for(self) -> str:
        unready = [child for child in self.supervisor.children if not child.ready.is_set()]
        reasons = [f"{child.spec.name} ({child.reason or 'starting'})" for child in unready]
        return ", ".join(reasons) or "schedulers and records on the bus"

    @asynccontextmanager
    async def _bus(self) -> AsyncIterator[Bus]:
        """A connection as the operator; raises BusError."""
        bus = await Bus.connect(self._nats, name=OPERATOR, credentials=self._credentials)
        try:
            yield bus
        finally:
            await bus.close()

    async def _keep_records(self, *, again: bool = False) -> None:
        """Topology, manifests, and the first tenants and keys. ``again``: only what is not there."""
        try:
            async with self._bus() as bus:
                for line in await topology.ensure(bus):
                    self._terminal.say(f"note: {line}")
                do = Administration(bus, operator(), peppers=read_peppers(self._directory.pepper))
                present = {record.name for record in await registry.models(bus)}
                wanted = {manifest.name: manifest for manifest in self._manifests}
                if not again and not self._options.nats_url:
                    kept = {each.name for name in wanted for each in await registry.adapters_of(bus, name)}
                    bases = {each.base.model for each in await registry.versions(bus) if each.base}
                    for name in sorted(present - wanted.keys() - kept, key=lambda name: name in bases):
                        await do.remove_model(name)
                for name, manifest in wanted.items():
                    if not again or name not in present:
                        changed = await do.publish(manifest)
                        if self._options.autoscale is not None:
                            low, high = self._options.autoscale
                            await do.change_model(name, ModelChange(replicas_min=low, replicas_max=high))
                        if changed.before is None:  # What an operator promoted since stays.
                            await do.set_stable(name, manifest.version)
                await self._keep_first_keys(bus, do)
        except (BusError, HeadraceError) as error:
            raise ComposeError(f"NATS refused what Headrace keeps there: {error}") from error

    def _forget_model(self, name: str) -> None:
        self._manifests = [manifest for manifest in self._manifests if manifest.name != name]

    async def _admit(self, users: list[str]) -> None:
        """Let users onto the bus, where it is our own; raises ComposeError."""
        if self._options.nats_url:
            return
        self._seeds.ensure(users)
        nats_config.write(self._directory.nats, self._seeds)
        system = msgspec.structs.replace(self._credentials, seed_file=self._seed_file(SYSTEM))
        try:
            await Servers(self._nats, system).reload()
        except TimeoutError as error:
            raise ComposeError("the bus does not take new users; its log says why") from error

    async def _keep_first_keys(self, bus: Bus, do: Administration) -> None:
        peppers = read_peppers(self._directory.pepper)
        for tenant, secret, scopes in (
            (DEMO_TENANT, self._secrets.key, ("inference", "usage")),
            (ADMIN_TENANT, self._secrets.admin_key, ("usage", *ADMIN_SCOPES)),
        ):
            if await registry.tenant(bus, tenant) is None:
                await do.create_tenant(NewTenant(name=tenant))
            if not await registry.keys_of_secret(bus, peppers, secret.encode()):
                await do.create_key(NewKey(tenant=tenant, scopes=scopes), secret)

    def _restarted(self, child: Child) -> None:
        self._write_run()
        if child.spec.role == "nats":
            if self._restoring:
                self._restoring.cancel()  # what it has entered may be lost with the store
            self._restoring = asyncio.create_task(self._restore(child))

    async def _restore(self, nats: Child) -> None:
        """Enter the records in a new life of NATS."""
        while True:
            await nats.ready.wait()
            try:
                await self._keep_records(again=True)
                return
            except ComposeError as error:
                self._terminal.say(f"note: the records are not entered yet: {error}")
            await asyncio.sleep(RESTORE_S)

    def _add_nats(self) -> Child:
        binary = nats_config.nats_server()
        port = self._ports.free()
        listen = f"127.0.0.1:{port}"
        self._nats = f"nats://{listen}"
        configuration = self._directory.nats / "nats.conf"
        self._seeds.ensure([OPERATOR, SYSTEM, *self._users()])
        nats_config.write_server(configuration, listen, self._directory.nats / "store", self._seeds, self._credentials)
        settings = {"GOMAXPROCS": str(nats_config.processors())}
        command = [binary, "-c", str(configuration)]
        return self._add("nats", 0, command, settings, lambda: nats_reason("127.0.0.1", port))

    def _add_gateway(self, index: int, port: int) -> None:
        listen = [f"{self._options.host}:{self._port}", f"127.0.0.1:{port}"]
        self._add_service(
            "gateway",
            index,
            {
                "HEADRACE_LISTEN": json.dumps(listen),
                "HEADRACE_ADMIN_LISTEN": json.dumps([f"127.0.0.1:{self._admin_port}"]),
                "HEADRACE_PEPPER_FILE": str(self._directory.pepper),
                "HEADRACE_TLS_CERT_FILE": self._options.tls_cert,
                "HEADRACE_TLS_KEY_FILE": self._options.tls_key,
                "HEADRACE_STACK_RUN": str(self._directory.run),
            },
            lambda: http_reason(f"{self._scheme}://127.0.0.1:{port}"),
        )

    def _sql_endpoint(self) -> dict[str, str]:
        """Settings of the ledger's SQL endpoint, which there is with the built-in engine."""
        if self._options.clickhouse_url:
            return {}
        self._sql = f"127.0.0.1:{self._ports.free()}"
        return {
            "HEADRACE_SQL_LISTEN": self._sql,
            "HEADRACE_SQL_USER": SQL_USER,
            "HEADRACE_SQL_PASSWORD_FILE": self._directory.secret_file("sql-password", self._secrets.sql_password),
        }

    def _add_service(self, role: Role, index: int, settings: dict[str, str], probe: Probe | None = None) -> Child:
        metrics_port = self._metrics_port(role, index)
        address = f"http://127.0.0.1:{metrics_port}"
        settings = settings | {
            "HEADRACE_NATS_URL": self._nats,
            "HEADRACE_NATS_SEED_FILE": self._seed_file(f"{role}-{index}"),
            "HEADRACE_LOG_FORMAT": "json",
            "HEADRACE_METRICS_HOST": "127.0.0.1",
            "HEADRACE_METRICS_PORT": str(metrics_port),
        }
        command = [sys.executable, "-P", "-m", role]
        return self._add(role, index, command, settings, probe or (lambda: http_reason(address)), f"{address}/metrics")

    def _metrics_port(self, role: Role, index: int) -> int:
        """The first gateway's, which gathers all, is the one after the admin port, if that is free."""
        if (role, index) == ("gateway", 0) and 0 < self._admin_port < 65_535:
            with contextlib.suppress(ComposeError):
                return self._ports.take("127.0.0.1", self._admin_port + 1)
        return self._ports.free()

    def _add(
        self, role: Role, index: int, command: list[str], settings: dict[str, str], probe: Probe, metrics_url: str = ""
    ) -> Child:
        name = "nats" if role == "nats" else f"{role}-{index}"
        log = self._directory.logs / f"{name}.log"
        spec = Spec(
            name=name,
            role=role,
            command=command,
            environment=_without_secrets(os.environ) | settings,
            log=log,
            probe=probe,
            grace_s=GRACE_S[role],
            metrics_url=metrics_url,
        )
        return self.supervisor.add(spec)

    @property
    def _url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self._options.host, self._options.host)  # noqa: S104 (read only)
        return f"{self._scheme}://{host}:{self._port}"

    @property
    def _admin_url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._admin_port}"

    @property
    def _scheme(self) -> str:
        return "https" if self._options.tls_cert else "http"

    def _users(self) -> list[str]:
        """Each process of a service has its own user on the bus."""
        options = self._options
        counts = {
            "gateway": options.gateways,
            "scheduler": options.schedulers,
            "worker": sum(options.workers),
            "ledger": 1,
        }
        return [f"{role}-{index}" for role, count in counts.items() for index in range(count)]

    def _seed_file(self, user: str) -> str:
        """On another's bus everybody is who the environment says."""
        if self._options.nats_url:
            return os.environ.get("HEADRACE_NATS_SEED_FILE", "")
        return str(self._seeds.path(user))

    @property
    def _credentials(self) -> Credentials:
        """The operator's."""
        return Credentials.from_environment(os.environ | {"HEADRACE_NATS_SEED_FILE": self._seed_file(OPERATOR)})

    def _write_run(self) -> None:
        """``run.json`` as things are now; nothing before a request would be served."""
        if not self._served:
            return
        self._directory.write_run(
            Run(
                url=self._url,
                admin_url=self._admin_url,
                gateway_urls=[f"{self._scheme}://127.0.0.1:{port}" for port in self._gateway_ports],
                metrics_urls={
                    role: [child.spec.metrics_url for child in self.supervisor.of(role)]
                    for role in ROLES
                    if role != "nats"
                },
                nats_url=self._nats,
                nats_seed_file="" if self._options.nats_url else self._seed_file(OPERATOR),
                key=self._secrets.key,
                admin_key=self._secrets.admin_key,
                pids={
                    role: [child.pid for child in self.supervisor.of(role) if child.pid is not None] for role in ROLES
                },
            )
        )

    def _greet(self, took_s: float) -> None:
        file = self._directory.first_key
        write_private(file, self._secrets.key.encode())
        greeting = Greeting(
            url=self._url,
            admin_url=self._admin_url,
            metrics_url=f"{self.supervisor.of('gateway')[0].spec.metrics_url}/stack",
            sql=f"http://{self._sql}" if self._sql else "",
            key=self._secrets.key,
            admin_key=self._secrets.admin_key,
            key_file=str(file),
            directory=str(self._directory.path),
            models=[manifest.name for manifest in self._manifests],
        )
        self._terminal.say(greeting.text(took_s=took_s, terminal=sys.stdout.isatty()))

"""A whole system of real processes that a test may kill, freeze, cut off and start again, one by one.

Unlike ``headrace up`` nothing is restarted by itself, and each service reaches NATS over a link of its own.
``quiet`` is the invariant of every test: once all requests have ended, nothing is left of them anywhere.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from compose.stack import nats_config
from compose.stack.data_dir import DataDir, read_peppers
from compose.stack.manifest import make_manifest
from compose.stack.processes import die_with
from compose.stack.seeds import SYSTEM, Seeds
from contracts import ids, operations, registry, subjects, topology
from contracts.bus import Bus, BusError, Credentials
from contracts.errors import HeadraceError
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Codec
from contracts.messages.queues import QueueAnswer
from contracts.messages.records import KeyRecord, TenantRecord
from contracts.messages.request import RequestEnvelope
from contracts.messages.usage import UsageAnswer, UsageQuery, UsageRow
from contracts.permissions import OPERATOR
from tests.support.nats_server import NatsServer, free_port
from tests.support.polling import until
from tests.support.proxy import Link, Links

ROOT = Path(__file__).parents[2]
MODEL = "simulated"
TENANT = "demo"
START_S = 30.0
STEPPING_CLOCK = """
import os, time

_file, _time, _time_ns = os.environ["TEST_CLOCK_AHEAD"], time.time, time.time_ns

def _ahead():
    try:
        with open(_file) as file:
            return float(file.read() or 0)
    except OSError:
        return 0.0

time.time = lambda: _time() + _ahead()
time.time_ns = lambda: _time_ns() + int(_ahead() * 1e9)
"""
"""What Python imports at its start, where a cluster's clocks step."""

_attempt = Codec[AttemptEvent](AttemptEvent)
_usage = Codec[UsageAnswer](UsageAnswer)


class OurNats(NatsServer):
    """A server with the users and settings of ``headrace up``."""

    def __init__(self, binary: str, directory: Path, seeds: Seeds) -> None:
        super().__init__(binary, directory)
        configuration = directory / "nats.conf"
        nats_config.write_server(configuration, self.url.removeprefix("nats://"), self.store, seeds)
        self._command = [binary, "-c", str(configuration), "-l", str(self._log)]


class Service:
    """One process. It keeps its ports, its link and its log over restarts."""

    def __init__(self, cluster: "Cluster", role: str, index: int, settings: dict[str, str]) -> None:
        self.role = role
        self.name = f"{role}-{index}"
        self.log = cluster.directory / f"{self.name}.log"
        self.link: Link = cluster.links.open(cluster.nats.port)
        self.metrics_port = free_port()
        self.settings = settings
        self.clock_ahead = cluster.directory / f"{self.name}.clock"
        """Seconds by which its wall clock is ahead; where the cluster's clocks step it is read at every look."""
        self.faketime = cluster.directory / f"{self.name}.faketime"
        """The same for libfaketime, which steps every clock of the process but the monotonic one."""
        self._cluster = cluster
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """A new life; whether it is ready is ``ready``'s business."""
        assert not self.alive, f"{self.name} runs already"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        environment |= self.settings | {
            "PYTHONPATH": f"{self._cluster.clocks}{os.pathsep}{ROOT}" if self._cluster.clocks else str(ROOT),
            "TEST_CLOCK_AHEAD": str(self.clock_ahead),
            "HEADRACE_NATS_URL": f"nats://127.0.0.1:{self.link.port}",
            "HEADRACE_NATS_SEED_FILE": str(self._cluster.seeds.path(self.name)),
            "HEADRACE_METRICS_PORT": str(self.metrics_port),
        }
        if self in self._cluster.clocked:
            self.set_clock(0)
            environment |= {
                "LD_PRELOAD": self._cluster.faketime,
                "FAKETIME_TIMESTAMP_FILE": str(self.faketime),
                "FAKETIME_CACHE_DURATION": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        parent = os.getpid()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.role],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with(parent),  # noqa: PLW1509
            )

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """At once and for good, like a power cut."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def set_clock(self, ahead_s: int) -> None:
        """From now on, within a second, its wall clock is so far ahead."""
        made = self.faketime.with_suffix(".new")
        made.write_text(f"{ahead_s:+d}\n")
        made.rename(self.faketime)

    async def exited(self, limit_s: float) -> int:
        """The exit code, once there is one."""
        await until(lambda: not self.alive, f"{self.name} ends", limit_s)
        code = self.exit_code
        assert code is not None
        return code

    async def ready(self) -> bool:
        return (await self.health()) == 200

    async def health(self) -> int:
        """Status of /health/ready; 0 when nobody answers."""
        try:
            answer = await self._cluster.http.get(f"http://127.0.0.1:{self.metrics_port}/health/ready", timeout=1.0)
        except httpx.HTTPError:
            return 0
        return answer.status_code

    async def page(self) -> str:
        """Its metrics; empty when it does not answer."""
        try:
            return (await self._cluster.http.get(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5.0)).text
        except httpx.HTTPError:
            return ""

    async def metric(self, name: str) -> float:
        """Sum over all labels; 0 when it is not there."""
        lines = [line for line in (await self.page()).splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def memory_mib(self) -> float:
        """Resident memory now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    @property
    def joined_as(self) -> str:
        """A worker's present name on the bus."""
        lines = [line for line in self.log.read_text().splitlines() if '"event": "joined"' in line]
        return str(json.loads(lines[-1])["worker"]) if lines else ""

    def says(self, event: str) -> int:
        """How often the log has the event."""
        return self.log.read_text(errors="replace").count(f'"event": "{event}"')


class Gateway(Service):
    """A gateway with an HTTP port of its own."""

    def __init__(self, cluster: "Cluster", index: int, settings: dict[str, str]) -> None:
        self.port = free_port()
        listen = json.dumps([f"127.0.0.1:{self.port}"])
        super().__init__(
            cluster, "gateway", index, settings | {"HEADRACE_LISTEN": listen, "HEADRACE_ADMIN_LISTEN": "[]"}
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def health(self) -> int:
        try:
            return (await self._cluster.http.get(f"{self.url}/health/ready", timeout=1.0)).status_code
        except httpx.HTTPError:
            return 0


class Cluster:
    """NATS and services. ``settings``: HEADRACE_ variables of all services, by lower-case name.

    ``faketime``: path of libfaketime, when gateways, schedulers and workers are to have wall clocks that can be set.
    """

    def __init__(
        self,
        directory: Path,
        nats_binary: str,
        *,
        gateways: int = 1,
        schedulers: int = 1,
        workers: int = 1,
        ledger: bool = False,
        stepping_clocks: bool = False,
        faketime: str = "",
        **settings: object,
    ) -> None:
        self.directory = directory
        self.faketime = faketime
        self.clocks = directory / "clocks" if stepping_clocks else None
        if self.clocks:
            self.clocks.mkdir()
            (self.clocks / "sitecustomize.py").write_text(STEPPING_CLOCK)
        self.data = DataDir(directory / "data")
        self.data.prepare()
        self.key = ids.api_key()
        self.seeds = Seeds(self.data.seeds)
        counts = {"gateway": gateways, "scheduler": schedulers, "worker": workers, "ledger": int(ledger)}
        users = [f"{role}-{index}" for role, count in counts.items() for index in range(count)]
        self.seeds.ensure([OPERATOR, SYSTEM, *users])
        self.nats = OurNats(nats_binary, directory, self.seeds)
        self.links = Links()
        self.http = httpx.AsyncClient(
            trust_env=False, timeout=120, limits=httpx.Limits(max_connections=None, max_keepalive_connections=100)
        )
        shared = {f"HEADRACE_{name.upper()}": str(value) for name, value in settings.items()}
        shared["HEADRACE_PEPPER_FILE"] = str(self.data.pepper)
        self.schedulers = [Service(self, "scheduler", index, shared) for index in range(schedulers)]
        self.workers = [Service(self, "worker", index, shared | {"HEADRACE_MODEL": MODEL}) for index in range(workers)]
        self.gateways = [Gateway(self, index, shared) for index in range(gateways)]
        url = {"HEADRACE_CLICKHOUSE_URL": f"chdb://{self.data.ledger}"}
        self.ledgers = [Service(self, "ledger", 0, shared | url)] if ledger else []
        self.calls: list[Call] = []
        """Requests that were begun here."""

    @property
    def clocked(self) -> list[Service]:
        """Those whose clocks can be set. The ledger takes the bus's time."""
        return [*self.schedulers, *self.workers, *self.gateways] if self.faketime else []

    @property
    def services(self) -> list[Service]:
        return [*self.schedulers, *self.workers, *self.gateways, *self.ledgers]

    async def start(self) -> None:
        self.nats.start()
        await self.keep_records()
        for service in self.services:
            service.start()
        await self.all_ready()

    async def all_ready(self, limit_s: float = START_S) -> None:
        for service in self.services:
            await until(service.ready, f"{service.name} is ready", limit_s)

    async def mend(self) -> None:
        """Start what is dead, thaw what is frozen, heal what is cut."""
        for service in self.services:
            service.link.heal()
            if service.alive:
                service.thaw()
            else:
                service.start()
        await self.all_ready()
        await self.whole()

    async def whole(self) -> None:
        """Wait until the scheduler counts on exactly those workers that are there, under their present names."""

        async def counts() -> bool:
            queue = await self.queue()
            known = {beat.worker for beat in queue.workers if beat.state == "ready"} if queue else set()
            return known == {worker.joined_as for worker in self.workers if worker.alive}

        await until(counts, "the scheduler knows the workers")

    async def close(self) -> None:
        for service in self.services:
            service.kill()
        self.nats.stop()
        self.links.close()
        await self.http.aclose()

    async def keep_records(self) -> None:
        """Streams, the model, the tenant and its key: what an operator restores after the store was lost."""
        async with self.bus() as bus:
            await topology.ensure(bus)
            await registry.put_version(bus, make_manifest("simulated", MODEL, 1_048_576))
            await registry.create_tenant(bus, TenantRecord(name=TENANT))
            await registry.keep_key(bus, read_peppers(self.data.pepper), self.key, KeyRecord(id="", tenant=TENANT))

    @property
    def credentials(self) -> Credentials:
        """The operator's."""
        return Credentials(seed_file=str(self.seeds.path(OPERATOR)))

    @property
    def environment(self) -> dict[str, str]:
        """Of commands for the operator of this bus."""
        return {"HEADRACE_NATS_URL": self.nats.url, "HEADRACE_NATS_SEED_FILE": self.credentials.seed_file}

    # What is on the bus --------------------------------------------------------------------------------------

    @asynccontextmanager
    async def bus(self) -> AsyncIterator[Bus]:
        bus = await Bus.connect(self.nats.url, name="test", credentials=self.credentials)
        try:
            yield bus
        finally:
            await bus.close()

    async def events(self, request_id: str = "") -> list[AttemptEvent]:
        """Terminal events of a request, or of all, by attempt."""
        subject = f"attempt.v1.*.{subjects.encode(request_id) if request_id else '*'}.*"
        async with self.bus() as bus:
            found = [_attempt.decode(message.data) async for message in bus.jetstream.read(topology.ATTEMPTS, subject)]
        return sorted(found, key=lambda event: (event.request_id, event.attempt))

    async def usage(self) -> UsageRow:
        """What the ledger has of all tenants, over all time; nothing while it is away."""
        question = UsageQuery(from_at_ms=0, to_at_ms=4_102_444_800_000, by=["model"])
        async with self.bus() as bus:
            try:
                answer = _usage.decode(
                    await bus.request(subjects.usage_all("usage"), msgspec.json.encode(question), timeout_s=10)
                )
            except BusError:
                return UsageRow()
        assert not answer.error, answer.error
        return answer.rows[0] if answer.rows else UsageRow()

    async def newest(self) -> int:
        """Sequence of the newest terminal event; for ``events_since``."""
        async with self.bus() as bus:
            return int((await bus.jetstream.api("STREAM.INFO.ATTEMPTS"))["state"]["last_seq"])

    async def events_since(self, seq: int) -> list[AttemptEvent]:
        """Terminal events stored after ``seq``, in order."""
        async with self.bus() as bus:
            stored = bus.jetstream.read(topology.ATTEMPTS, "attempt.v1.>", start_seq=seq + 1)
            return [_attempt.decode(message.data) async for message in stored]

    async def ended(self, request_id: str, count: int = 1, limit_s: float = 20.0) -> list[AttemptEvent]:
        """The terminal events of a request, once there are ``count``."""

        async def enough() -> list[AttemptEvent]:
            found = await self.events(request_id)
            return found if len(found) >= count else []

        events: list[AttemptEvent] = await until(enough, f"{count} ends of {request_id}", limit_s)
        return events

    async def stored(self, stream: str) -> int:
        async with self.bus() as bus:
            return int((await bus.jetstream.api(f"STREAM.INFO.{stream}"))["state"]["messages"])

    async def queue(self) -> QueueAnswer | None:
        """The scheduler's own view; None when nobody owns the model."""
        async with self.bus() as bus:
            try:
                return await operations.queue(bus, MODEL)
            except (BusError, HeadraceError):
                return None

    async def running(self) -> tuple[int, int]:
        """Requests that run and that wait; (-1, -1) without a scheduler."""
        queue = await self.queue()
        return (queue.running, queue.waiting) if queue else (-1, -1)

    async def runs(self, running: int, waiting: int, limit_s: float = 20.0) -> None:
        async def as_said() -> bool:
            return await self.running() == (running, waiting)

        await until(as_said, f"{running} run and {waiting} wait", limit_s)

    async def quiet(self, limit_s: float = 20.0) -> None:
        """Wait until nothing is left of any request: reservations, slots, REQUESTS, WORK, BODIES, engines."""

        async def left() -> list[str]:
            held = {name: await self.stored(name) for name in ("REQUESTS", "WORK", "BODIES")}
            found = [f"{count} in {name}" for name, count in held.items() if count]
            queue = await self.queue()
            if queue is None:
                return [*found, "no scheduler"]
            if queue.running or queue.waiting or queue.reserved_tokens:
                found.append(f"{queue.running} run, {queue.waiting} wait, {queue.reserved_tokens} tokens reserved")
            found += [
                f"{beat.worker} holds {len(beat.in_flight)}" for beat in queue.workers if beat.in_flight or beat.running
            ]
            return found

        deadline = time.monotonic() + limit_s
        while what := await left():
            if time.monotonic() > deadline:
                pytest.fail(f"not quiet within {limit_s:g} s: {'; '.join(what)}\n{self.logs()}")
            await asyncio.sleep(0.05)

    async def owner(self) -> Service:
        """The scheduler that owns the model."""

        async def find() -> Service | None:
            owners = [scheduler for scheduler in self.schedulers if scheduler.alive and await _owns(scheduler)]
            return owners[0] if len(owners) == 1 else None

        found: Service = await until(find, "a scheduler owns the model")
        return found

    async def worker_of(self, request_id: str) -> Service:
        """The worker that holds the request, as the scheduler has heard."""

        async def find() -> Service | None:
            queue = await self.queue()
            if queue is None:
                return None
            names = [beat.worker for beat in queue.workers for one in beat.in_flight if one.request_id == request_id]
            return next((worker for worker in self.workers if names and worker.joined_as == names[0]), None)

        found: Service = await until(find, f"a worker holds {request_id}")
        return found

    async def busy_worker(self) -> Service:
        """The worker that holds something, by its own gauge."""

        async def find() -> Service | None:
            for worker in self.workers:
                if worker.alive and await worker.metric("headrace_worker_attempts_in_flight") > 0:
                    return worker
            return None

        found: Service = await until(find, "a worker holds something")
        return found

    def logs(self, lines: int = 8) -> str:
        return "\n".join(
            "\n".join([f"--- {service.name}", *service.log.read_text(errors="replace").splitlines()[-lines:]])
            for service in self.services
            if service.log.exists()
        )

    # Requests ------------------------------------------------------------------------------------------------

    def ask(
        self,
        *,
        gateway: int = 0,
        stream: bool = True,
        words: Sequence[str] = ("one",),
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> "Call":
        """Begin a chat; ``body`` and ``headers`` are over the defaults."""
        call = Call(self, self.gateways[gateway], {"messages": chat(words), "stream": stream} | body, headers or {})
        self.calls.append(call)
        return call

    async def serves(self, limit_s: float = 20.0) -> None:
        """Wait until a request is answered."""

        async def answered() -> bool:
            call = self.ask(max_tokens=1)
            await call.done()
            return call.complete

        await until(answered, "a request is answered", limit_s)


async def _owns(scheduler: Service) -> bool:
    try:
        answer = await scheduler._cluster.http.get(f"http://127.0.0.1:{scheduler.metrics_port}/metrics", timeout=1.0)
    except httpx.HTTPError:
        return False
    return "headrace_requests_waiting{" in answer.text


def chat(words: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": " ".join(words)}]


class Call:
    """One request of one caller, in progress or over, and everything that the caller saw of it."""

    def __init__(self, cluster: Cluster, gateway: Gateway, body: dict[str, Any], headers: Mapping[str, str]) -> None:
        self.body = {"model": MODEL} | body
        self.status = 0
        self.request_id = ""
        self.data: list[str] = []
        """Data of the server-sent events, or the one body."""
        self.text = ""
        self.broke = ""
        """How the connection ended when it ended badly."""
        self.asked_at = time.monotonic()
        self.first_at = 0.0
        self.ended_at = 0.0
        self.token_times: list[float] = []
        self._stream = bool(self.body["stream"])
        self._client = cluster.http
        self._url = f"{gateway.url}/v1/chat/completions"
        self._headers = {"Authorization": f"Bearer {cluster.key}", **headers}
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            request = self._client.stream("POST", self._url, json=self.body, headers=self._headers)
            async with request as response:
                self.request_id = response.headers.get("x-request-id", "")
                self.status = response.status_code
                if self.status != 200 or not self._stream:
                    self.data.append((await response.aread()).decode())
                    self._read_body()
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        self._read_event(line[6:])
        except httpx.HTTPError as error:
            self.broke = repr(error)
        finally:
            self.ended_at = time.monotonic()

    def _read_body(self) -> None:
        if self.status == 200:
            self.text = json.loads(self.data[0])["choices"][0]["message"]["content"]

    def _read_event(self, data: str) -> None:
        self.data.append(data)
        if data == "[DONE]" or data.startswith('{"error"'):
            return
        choices = json.loads(data)["choices"]
        if choices and (piece := choices[0]["delta"].get("content")):
            now = time.monotonic()
            self.first_at = self.first_at or now
            self.token_times.append(now)
            self.text += piece

    async def done(self, limit_s: float = 90.0) -> "Call":
        """Wait for the end."""
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.shield(self._task)
        except TimeoutError:
            pytest.fail(f"request {self.request_id} has no end within {limit_s:g} s; so far {self.text[-80:]!r}")
        return self

    async def leave(self) -> None:
        """Hang up."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @property
    def over(self) -> bool:
        return self._task.done()

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens, as they came."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]

    @property
    def tokens(self) -> int:
        return len(self.token_times)

    async def shows(self, tokens: int) -> None:
        """Wait until so many tokens have come."""
        await until(lambda: self.tokens >= tokens or self.over, f"{tokens} tokens", 30)
        assert self.tokens >= tokens, self.story()

    @property
    def complete(self) -> bool:
        """It ended as a whole answer."""
        if self.broke or self.status != 200 or not self.over:
            return False
        return not self._stream or self.data[-1:] == ["[DONE]"]

    @property
    def error(self) -> dict[str, Any]:
        """The error that it ended with; empty when it did not."""
        if self.data and self.data[-1].startswith('{"error"'):
            error: dict[str, Any] = json.loads(self.data[-1])["error"]
            return error
        return {}

    @property
    def code(self) -> str:
        """Code of its error; empty when it ended well or broke."""
        return str(self.error.get("code", ""))

    @property
    def endings(self) -> int:
        """How many endings the caller saw; there must be one."""
        if not self._stream or self.status != 200:
            return len(self.data)
        return sum(data == "[DONE]" or data.startswith('{"error"') for data in self.data)

    def story(self) -> str:
        return f"{self.request_id} {self.status} {self.broke} {self.text[-60:]!r} {self.error}"


def counted(tokens: int) -> str:
    """The simulated engine's answer without a script."""
    return " ".join(f"t{number}" for number in range(tokens))


def envelope(request_id: str, **fields: Any) -> RequestEnvelope:
    """A request as a gateway would store it; for tests that speak to the bus themselves."""
    now_ms = time.time_ns() // 1_000_000
    values: dict[str, Any] = {
        "request_id": request_id,
        "tenant": TENANT,
        "key_id": "k",
        "model": MODEL,
        "endpoint": "chat/completions",
        "stream": True,
        "prompt_tokens": 5,
        "max_output_tokens": 16,
        "choices": 1,
        "priority": "interactive",
        "admitted_at_ms": now_ms,
        "publish_within_ms": 10_000,
        "deadline_ms": 60_000,
        "reply": {"subject": f"reply.v1.{TENANT}.test", "stream": request_id},
    }
    return msgspec.convert(values | fields, RequestEnvelope)

"""TLS to the bus: who trusts whom, in both directions, and certificates that are replaced while connections stand."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from compose.stack import nats_config
from compose.stack.seeds import SYSTEM, Seeds
from contracts.bus import Bus, BusError, Credentials
from tests.support.authority import Authority
from tests.support.nats_server import NatsServer
from tests.support.polling import until


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    return Authority(tmp_path / "authority")


@pytest.fixture
def seeds(tmp_path: Path) -> Seeds:
    made = Seeds(tmp_path / "seeds")
    made.ensure(["operator", SYSTEM, "gateway-0"])
    return made


@pytest.fixture
def nats(nats_binary: str, tmp_path: Path, seeds: Seeds, authority: Authority) -> Iterator[NatsServer]:
    """A server that speaks TLS alone, with those that have a certificate."""
    server = NatsServer(nats_binary, tmp_path)
    configuration = tmp_path / "nats.conf"
    listen = server.url.removeprefix("nats://")
    nats_config.write_server(configuration, listen, server.store, seeds, authority.credentials("server"))
    server._command = [nats_binary, "-c", str(configuration), "-l", str(tmp_path / "nats.log")]
    server.start()
    yield server
    server.stop()


async def test_both_sides_show_a_certificate(
    nats: NatsServer, authority: Authority, seeds: Seeds, tmp_path: Path
) -> None:
    seed = str(seeds.path("operator"))
    mine = authority.credentials("operator", seed)
    bus = await Bus.connect(nats.url, name="operator", credentials=mine)
    await bus.subscribe("a", lambda message: message.respond(b"yes"))
    assert await bus.request("a", b"") == b"yes"
    await bus.close()
    stranger = Authority(tmp_path / "stranger")
    cert, key = stranger.issue("operator")
    for wrong in (
        Credentials(seed_file=seed),
        Credentials(seed_file=seed, ca_file=mine.ca_file),
        Credentials(seed_file=seed, ca_file=str(stranger.ca), cert_file=mine.cert_file, key_file=mine.key_file),
        Credentials(seed_file=seed, ca_file=mine.ca_file, cert_file=cert, key_file=key),
        Credentials(ca_file=mine.ca_file, cert_file=mine.cert_file, key_file=mine.key_file),
    ):
        with pytest.raises(BusError):
            await Bus.connect(nats.url, name="operator", credentials=wrong, timeout_s=0.7)


async def test_a_server_without_tls_learns_nothing(nats_binary: str, tmp_path: Path, authority: Authority) -> None:
    """It may be somebody in between, who leaves TLS out of the server's first words."""
    plain = NatsServer(nats_binary, tmp_path)
    plain.start()
    mine = authority.credentials("gateway-0")
    try:
        with pytest.raises(BusError, match="offers no TLS"):
            await Bus.connect(plain.url, name="gateway-0", credentials=mine, timeout_s=0.7)
    finally:
        plain.stop()


async def test_a_certificate_is_replaced_and_the_connection_made_anew(
    nats: NatsServer, authority: Authority, seeds: Seeds
) -> None:
    mine = authority.credentials("gateway-0", str(seeds.path("gateway-0")))
    bus = await Bus.connect(nats.url, name="gateway-0", credentials=mine)
    authority.issue("gateway-0")
    await until(lambda: bus.session.reconnects > 0 and bus.connected, "the connection is made anew")
    await bus.session.barrier()
    await bus.close()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"cert_file": "c", "ca_file": "a"}, "both its file and its key"),
        ({"cert_file": "c", "key_file": "k"}, "HEADRACE_NATS_CA_FILE"),
        ({"ca_file": "nowhere"}, "cannot be used"),
        ({"seed_file": "nowhere"}, "cannot be read"),
    ],
)
async def test_what_cannot_work_is_told_before_anybody_is_asked(files: dict[str, str], reason: str) -> None:
    with pytest.raises(BusError, match=reason):
        await Bus.connect("nats://127.0.0.1:1", name="a", credentials=Credentials(**files))

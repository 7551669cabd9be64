"""D31: no prompt, no output and no key of a request is in any file but where the bodies of open requests must lie."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts import topology
from contracts.bus import Bus
from tests.support import canary
from tests.support.polling import until
from tests.support.stack import Stack

TEXT = "KanarienvogelZwitschert7"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that traces everything (to nobody) and logs all that it can say."""
    stack = Stack(
        tmp_path_factory.mktemp("told") / "data",
        "--engine",
        "simulated",
        HEADRACE_LOG_LEVEL="debug",
        HEADRACE_OTLP_ENDPOINT="http://127.0.0.1:9/v1/traces",
        HEADRACE_TRACE_SAMPLE="1",
    ).wait_ready()
    try:
        canary.say(stack, TEXT, engine="simulated", name=stack.model)
        yield stack
    finally:
        stack.stop()


async def left(stack: Stack) -> int:
    """Messages in the streams where bodies lie."""
    bus = await Bus.connect(stack.run.nats_url, name="operator", credentials=stack.credentials)
    try:
        infos = [
            await bus.jetstream.api(f"STREAM.INFO.{stream}")
            for stream in (topology.REQUESTS, topology.WORK, topology.BODIES)
        ]
        return sum(int(info["state"]["messages"]) for info in infos)
    finally:
        await bus.close()


async def test_d31_no_text_of_a_request_is_in_any_file(told: Stack) -> None:
    async def nothing_left() -> bool:
        return await left(told) == 0

    await until(nothing_left, "the bodies of ended requests are gone")
    log = (told.data_dir / "logs" / "gateway-0.log").read_text()
    assert log.count("request_finished") > 50, "the requests were made"
    assert canary.files_with(told.data_dir, TEXT) == []
    assert TEXT not in told.output.read_text()
    told.stop()
    assert canary.files_with(told.data_dir, TEXT) == []


def test_the_search_finds_what_there_is(tmp_path: Path) -> None:
    for name in ("a/REQUESTS/1.blk", "a/ATTEMPTS/1.blk"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"..." + TEXT.encode())
    assert canary.files_with(tmp_path, TEXT) == ["a/ATTEMPTS/1.blk"]

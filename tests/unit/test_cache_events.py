"""vLLM's publisher by its socket: nothing is missed, a gap clears, and a new engine begins anew."""

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from contracts.prefix import keys_of
from tests.support.polling import wait_until
from worker.engines.vllm.cache_events import CacheEvents

SIZE = 32


class Publisher:
    """As vLLM 0.32's: topic, number from 0 on, batch; bound to the endpoint that it was given."""

    def __init__(self, endpoint: str) -> None:
        self.number = 0
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        assert self.socket.poll(10_000), "somebody listens"
        self.socket.recv()

    def send(self, *events: dict[str, Any]) -> None:
        batch = msgspec.msgpack.encode([0.0, list(events), 0])
        self.socket.send_multipart([b"kv", self.number.to_bytes(8), batch])
        self.number += 1

    def store(self, tokens: list[int]) -> None:
        names = [str(tokens[: end + SIZE]).encode() for end in range(0, len(tokens) // SIZE * SIZE, SIZE)]
        event = {"type": "BlockStored", "block_hashes": names, "parent_block_hash": None, "token_ids": tokens}
        self.send(event | {"block_size": SIZE, "medium": "GPU", "extra_keys": [("t.",), *[None] * (len(names) - 1)]})


@pytest.fixture
def read() -> Iterator[CacheEvents]:
    made = CacheEvents()
    made.start()
    yield made
    made.close()
    assert "kv-events" not in {thread.name for thread in threading.enumerate()}


def all_kept(read: CacheEvents) -> bytes:
    _, tellings = read.kept.take(anew=True)
    return b"".join(run.keys for telling in tellings for run in telling.stored)


def text(start: int) -> list[int]:
    return list(range(start, start + 320))


def keys(start: int) -> bytes:
    return keys_of("t.", [*text(start), 0])


def test_what_is_sent_is_kept_however_late_it_is_taken(read: CacheEvents) -> None:
    """Reading waits for nobody: vLLM's engine stands still while its publisher's queue is full."""
    publisher = Publisher(read.endpoint)
    try:
        for start in range(500):
            publisher.store(text(start))
        publisher.send({"type": "BlockRemoved", "block_hashes": [str(text(0)[:SIZE]).encode()], "medium": "GPU"})
        publisher.store(text(5_000))
        wait_until(lambda: keys(5_000) in all_kept(read))
        kept = all_kept(read)
        assert all(keys(start) in kept for start in range(1, 500))
    finally:
        publisher.socket.close()


@pytest.mark.parametrize("number", [5, 0], ids=["some were missed", "its numbers begin anew"])
def test_after_a_gap_all_before_it_is_forgotten_and_told_so(read: CacheEvents, number: int) -> None:
    publisher = Publisher(read.endpoint)
    try:
        publisher.store(text(0))
        publisher.store(text(1_000))
        wait_until(lambda: keys(1_000) in all_kept(read))
        publisher.number = number
        publisher.store(text(2_000))
        wait_until(lambda: keys(2_000) in all_kept(read))
        assert all_kept(read) == keys(2_000)
    finally:
        publisher.socket.close()


def test_what_cannot_be_read_harms_nothing_after_it(read: CacheEvents) -> None:
    publisher = Publisher(read.endpoint)
    try:
        for batch in (
            b"",
            b"\xc1",
            msgspec.msgpack.encode(7),
            msgspec.msgpack.encode([0.0, [{"type": "BlockStored"}]]),
        ):
            publisher.socket.send_multipart([b"kv", publisher.number.to_bytes(8), batch])
            publisher.number += 1
        publisher.store(text(0))
        wait_until(lambda: keys(0) in all_kept(read))
    finally:
        publisher.socket.close()


def test_a_new_engine_is_told_of_anew() -> None:
    """Its reader begins with nothing, and says that this is all."""
    read = CacheEvents()
    assert read.kept.take(anew=False) == (True, [])
    assert read.kept.take(anew=False) == (False, [])
    read.close()

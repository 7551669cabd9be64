"""vLLM's events of its KV cache, read from its ZMQ publisher into CachedBlocks, in a thread of its own.

The publisher's queue is bounded, and vLLM's engine stands still while it is full (vLLM 0.32): so nothing but the
reading is done here, and an event loop that is late holds up nobody.
"""

import shutil
import tempfile
import threading
from typing import Any

import msgspec
import structlog

from worker.engines.cached_blocks import CachedBlocks

POLL_MS = 200

_log = structlog.get_logger()


class CacheEvents:
    """``start`` before the engine, ``close`` after it."""

    def __init__(self) -> None:
        self.kept = CachedBlocks()
        self._directory = tempfile.mkdtemp(prefix="headrace-kv-")
        self.endpoint = f"ipc://{self._directory}/events"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    @property
    def configuration(self) -> dict[str, Any]:
        """vLLM's ``kv_events_config``."""
        return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.endpoint, "topic": "kv"}

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(2 * POLL_MS / 1000)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _run(self) -> None:
        import zmq

        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(self.endpoint)
        expected = 0
        try:
            while not self._over.is_set():
                if not socket.poll(POLL_MS):
                    continue
                frames = socket.recv_multipart()
                number = int.from_bytes(frames[-2])
                if number != expected:
                    _log.warning("kv_events_missed", expected=expected, got=number)
                    self.kept.cleared()
                expected = number + 1
                try:
                    take(self.kept, msgspec.msgpack.decode(frames[-1]))
                except (msgspec.MsgspecError, TypeError, ValueError, LookupError, AttributeError) as error:
                    _log.warning("kv_events_unreadable", number=number, reason=type(error).__name__)
                    self.kept.cleared()  # As good as missed.
        except Exception:
            _log.exception("kv_events_broke")
            self.kept.cleared()
        finally:
            socket.close()
            context.term()


def take(kept: CachedBlocks, batch: list[Any]) -> None:
    """A batch as vLLM 0.32 sends it: [time, events, rank], events as maps with their ``type``."""
    for event in batch[1]:
        if event.get("medium") not in (None, "GPU") or event.get("group_idx") or event.get("lora_name"):
            continue  # Another tier of memory, another kind of layer, or an adapter's.
        match event["type"]:
            case "BlockStored":
                salt = ""
                if (extra := event.get("extra_keys")) and extra[0]:
                    salt = next((each for each in reversed(extra[0]) if isinstance(each, str)), "")
                parent = event.get("parent_block_hash")
                kept.stored(event["block_hashes"], parent, event["token_ids"], event["block_size"], salt)
            case "BlockRemoved":
                kept.removed(event["block_hashes"])
            case "AllBlocksCleared":
                kept.cleared()

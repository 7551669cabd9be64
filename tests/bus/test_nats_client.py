"""What the adapter takes from nats-py without being promised it: a new version that changes it fails here, in words.

The version is bounded in pyproject; raise the bound when these tests and those of the session pass.
"""

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client as LibraryClient
from nats.aio.subscription import Subscription as LibrarySubscription

from contracts.bus import Bus, nats_client
from tests.support.nats_server import Connect


def _is_task(value: object) -> bool:
    return isinstance(value, asyncio.Task)


PRIVATE = {
    "_reading_task": ("the task that reads the socket: watched, since a dead one leaves the client deaf", _is_task),
    "_flusher_task": ("the task that writes what is buffered: watched", _is_task),
    "_ping_interval_task": ("the task that pings: watched, since it finds a half-open link", _is_task),
    "_reconnection_task": ("the task that reconnects, None before: watched, since it may die", lambda v: v is None),
    "_status": (
        "the state, set to CONNECTED so that a dead reconnect can be started again",
        LibraryClient.CONNECTED.__eq__,
    ),
    "_transport": ("the socket's wrapper, whose writer is dropped at once", lambda v: hasattr(v, "_io_writer")),
    "_io_writer": ("the stream writer in _transport", None),
    "_pending": ("what is yet to be written, dropped when the connection is lost", lambda v: isinstance(v, list)),
    "_pending_data_size": ("its size in bytes", lambda v: isinstance(v, int)),
    "_ps": ("takes apart what comes in: ours in the library's place", lambda v: hasattr(v, "parse")),
    "_subs": ("subscriptions by their number, sent anew after a reconnect", lambda v: isinstance(v, dict)),
    "_sid": ("the number of the last one", lambda v: isinstance(v, int)),
    "_remove_sub": ("overridden, so that what takes the messages of one that ends is forgotten", inspect.ismethod),
    "_process_ping": ("answers a ping", inspect.ismethod),
    "_process_pong": ("ends a flush", inspect.ismethod),
    "_process_info": ("what the server says of itself and of others", inspect.ismethod),
    "_max_payload": ("the server's bound on a message", lambda v: isinstance(v, int)),
    "_max_pending_size": ("bytes that may wait to be written before publishing waits", lambda v: v > 0),
    "_flush_pending": ("waits until what is to be written is", inspect.ismethod),
    "_pending_queue": ("messages of a subscription that wait for its handler", lambda v: hasattr(v, "put_nowait")),
    "_pending_size": ("bytes of them", lambda v: isinstance(v, int)),
    "_pending_bytes_limit": ("at most", lambda v: v > 0),
    "_flush_queue": ("wakes the task that writes and waits for the socket", lambda v: hasattr(v, "put_nowait")),
    "_connect_to_server": ("overridden, so that the socket of a failed try is not leaked", inspect.ismethod),
    "_connect_command": ("overridden, so that nothing secret goes over a connection without TLS", inspect.ismethod),
    "_process_err": ("overridden, so that a user who is refused once may come back", inspect.ismethod),
    "_process_op_err": ("begins a reconnect", inspect.ismethod),
    "_ping_interval": ("overridden, so that a server that is heard is not asked whether it lives", inspect.ismethod),
    "_pings_outstanding": ("pings without an answer", lambda v: isinstance(v, int)),
    "_send_ping": ("asks the server whether it lives", inspect.ismethod),
    "_server_info": ("what the server said first: whether it speaks TLS", lambda v: "version" in v),
    "_signature_cb": ("signs the challenge, called before _public_nkey is read", lambda v: v is None),
    "_public_nkey": ("the user's public key, sent beside the signature", lambda v: v is None),
    "_error_cb": ("is told of errors", inspect.ismethod),
}
"""Name: what it is and why it is used, and what it must look like in a connected client."""


@pytest.mark.parametrize("name", PRIVATE)
async def test_a_connected_client_has_the_private_parts_that_are_used(name: str, connect: Connect) -> None:
    client = (await connect()).session._client
    meaning, fits = PRIVATE[name]
    [subscription] = client._subs.values()  # of the inbox
    owner: Any = client._transport if name == "_io_writer" else client
    owner = subscription if name.startswith("_pending_") and name != "_pending_data_size" else owner
    assert hasattr(owner, name), f"nats-py has no {name} any more ({meaning}): look for what took its place"
    value = getattr(owner, name)
    if fits is not None:
        assert fits(value), f"nats-py's {name} is now {value!r}; it was {meaning}"
    else:
        assert hasattr(value.transport, "abort"), f"nats-py's {name} is now {value!r}; it was a StreamWriter"


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("_remove_sub", ["self", "sid", "max_msgs"]),
        ("_connect_to_server", ["self", "s"]),
        ("_connect_command", ["self"]),
        ("_process_err", ["self", "err_msg"]),
        ("_ping_interval", ["self"]),
    ],
)
def test_overridden_methods_are_called_as_they_were(name: str, parameters: list[str]) -> None:
    found = list(inspect.signature(getattr(LibraryClient, name)).parameters)
    assert found == parameters, f"nats-py's {name} takes {found} now, and ours {parameters}"
    source = inspect.getsource(LibraryClient) + inspect.getsource(LibrarySubscription)
    assert f".{name}(" in source, f"nats-py does not call {name} any more: ours has no effect"


async def test_a_server_that_is_heard_is_not_pinged_and_a_silent_one_is_given_up(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = (await connect()).session._client
    done: list[str] = []
    heard = iter([1, 2, 3, 3, 3, 3])

    async def tick(seconds: float) -> None:
        client._ps.heard = next(heard)

    async def send_ping() -> None:
        done.append("ping")

    async def lost(error: Exception) -> None:
        done.append(type(error).__name__)

    monkeypatch.setattr(nats_client, "tick", tick)
    monkeypatch.setattr(client, "_send_ping", send_ping)
    monkeypatch.setattr(client, "_process_op_err", lost)
    await client._ping_interval()
    assert done == ["ping", "ping", "StaleConnectionError"]


async def test_received_messages_are_built_by_our_method(bus: Bus) -> None:
    got: list[object] = []
    await bus.subscribe("a", got.append)
    await bus.publish("a", b"1")
    await bus.session.barrier()
    assert [type(message).__name__ for message in got] == ["Incoming"]


def test_the_table_names_all_private_parts_that_the_adapter_uses() -> None:
    tree = ast.parse(inspect.getsource(nats_client))
    accessed = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    accessed |= {node.name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef)}
    accessed |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)} & set(PRIVATE)
    own = {"_session", "_revive", "_credentials", "_stamp", "_sign", "_client", "_reader"}
    own |= {"_direct", "_pace", "_write", "_write_due", "_queue_up"}
    assert {name for name in accessed if name.startswith("_") and not name.endswith("__")} - own == set(PRIVATE)


def test_one_file_imports_the_library() -> None:
    """That no other folder does is a rule of the import linter."""
    files = Path(nats_client.__file__).parent.glob("*.py")
    assert [path.name for path in files if re.search(r"^\s*(import|from) nats\b", path.read_text(), re.MULTILINE)] == [
        "nats_client.py"
    ]

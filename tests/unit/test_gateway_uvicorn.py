"""What gateway.http.server builds on inside uvicorn, which promises none of it. The only file that does."""

import ast
import asyncio
import inspect
import textwrap
import tomllib
from pathlib import Path

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.http.server import Protocol, Server

ROOT = Path(__file__).parents[2]
CHANGED = (
    f"uvicorn {uvicorn.__version__} is not what gateway/http/server.py was written against: {{}}. "
    "Read what came in its place, change that file, and only then raise the bound in pyproject.toml."
)


def used(kind: type) -> set[str]:
    """Names that methods of ``kind`` ask of ``self`` and ``super()``."""
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind))))
    asked = (node for node in nodes if isinstance(node, ast.Attribute))
    return {
        node.attr
        for node in asked
        if (isinstance(node.value, ast.Name) and node.value.id == "self")
        or (isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super")
    }


def own(kind: type) -> set[str]:
    return {name for name in vars(kind) if name.startswith("_") and not name.startswith("__")} | {"serving"}


async def test_the_protocol_has_what_we_read_and_set() -> None:
    loop = asyncio.get_running_loop()
    config = uvicorn.Config(lambda: None, http=Protocol, loop="none", log_config=None)
    config.load()
    protocol = HttpToolsProtocol(config, ServerState(), {}, loop)
    # Set when a request begins.
    at_a_request = {"url", "headers"}
    source = inspect.getsource(HttpToolsProtocol)
    missing = {name for name in used(Protocol) - own(Protocol) - at_a_request if not hasattr(protocol, name)}
    missing |= {name for name in at_a_request if f"self.{name} = " not in source and f"self.{name}: " not in source}
    missing |= set() if "response_complete" in source else {"response_complete"}
    assert not missing, CHANGED.format(f"the protocol has no {', '.join(sorted(missing))}")


@pytest.mark.parametrize(("ours", "theirs"), [(Protocol, HttpToolsProtocol), (Server, uvicorn.Server)])
def test_what_we_override_is_there_and_is_called_alike(ours: type, theirs: type) -> None:
    for name, method in vars(ours).items():
        if not callable(method) or (name.startswith("_") and name != "__init__"):
            continue
        assert hasattr(theirs, name), CHANGED.format(f"nothing calls {name}")
        expected = list(inspect.signature(getattr(theirs, name)).parameters)
        assert list(inspect.signature(method).parameters) == expected, CHANGED.format(f"{name} takes {expected}")


def test_the_parsers_errors_reach_the_answer_by_way_of_send_400_response() -> None:
    source = inspect.getsource(HttpToolsProtocol.data_received)
    assert "self.send_400_response(" in source, CHANGED.format("data_received does not call send_400_response")


def test_the_version_has_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [requirement] = [line for line in project["dependencies"] if line.startswith("uvicorn")]
    assert ",<" in requirement, requirement

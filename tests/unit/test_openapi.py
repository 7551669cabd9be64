"""The OpenAPI document holds every route, every kind of refusal, and schemas that mean what the checks mean."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from contracts import errors
from contracts.errors import HeadraceError
from contracts.messages.records import Manifest
from gateway.apis.fields import model_of
from gateway.apis.table import APIS
from gateway.config import GatewayConfig
from gateway.http import openapi, routes
from gateway.management import admin, operations, usage
from tests.unit.test_asyncapi import references, resolved


def applications() -> tuple[FastAPI, FastAPI]:
    """The routes of both listeners alone: nothing is called, and nobody would answer."""
    services: Any = SimpleNamespace(config=GatewayConfig(pepper="none"))
    inference: Any = print
    public = routes.public(services, inference, (usage.own,))
    return public._app, routes.private(services, (usage.everyones, admin.router, operations.router))._app


APPS = applications()
DOCUMENTS = [json.loads(json.dumps(openapi.document(app))) for app in APPS]
DOCUMENT = DOCUMENTS[0]
MANIFEST = Manifest(name="m", version="1", engine="simulated", context=4096, default_output_tokens=16)
BASE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(("app", "document"), list(zip(APPS, DOCUMENTS, strict=True)))
def test_every_route_is_described_and_nothing_else(app: FastAPI, document: dict[str, Any]) -> None:
    served = {
        (method.lower(), route.path.replace(":path", ""))
        for route in app.router.routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert served == {(method, path) for path, verbs in document["paths"].items() for method in verbs}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_schemas_have_names_of_their_own(document: dict[str, Any]) -> None:
    """Two structs of one name would be told apart by their modules, which are nobody's business."""
    assert not [name for name in document["components"]["schemas"] if "." in name or name.startswith("_")]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_references_lead_somewhere_and_ids_are_unique(document: dict[str, Any]) -> None:
    for reference in references(document):
        assert resolved(document, reference) is not None
    ids = [operation["operationId"] for verbs in document["paths"].values() for operation in verbs.values()]
    assert len(ids) == len(set(ids))


def test_every_error_is_a_documented_answer_of_something() -> None:
    """But those that no described operation can give: 404 and 405 of paths and methods that are not there."""
    documented = {
        status
        for document in DOCUMENTS
        for verbs in document["paths"].values()
        for operation in verbs.values()
        for status in operation["responses"]
    }
    assert {str(entry.status) for entry in errors.TABLE.values()} - documented == {"405"}


def chat_schema() -> jsonschema.Draft202012Validator:
    schema = {"$ref": "#/components/schemas/ChatBody", "components": DOCUMENT["components"]}
    return jsonschema.Draft202012Validator(schema)


def check(body: dict[str, Any]) -> None:
    model_of(body)
    APIS["chat/completions"].validate(body, MANIFEST, None)


def test_the_pages_load_nothing_from_elsewhere() -> None:
    for page in Path(routes.__file__).with_name("static").glob("*.html"):
        assert not re.search(r"(src|href)=\"?(https?:)?//|@import|url\(", page.read_text()), page


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"max_tokens": "5"},
        {"max_tokens": 2.5},
        {"temperature": 2.5},
        {"top_p": -0.1},
        {"n": 129},
        {"seed": 2**64},
        {"stop": ""},
        {"stop": ["a"] * 17},
        {"messages": []},
        {"messages": [{"role": "banana", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"logit_bias": {"1": 101}},
        {"response_format": {"type": "xml"}},
        {"model": None},
    ],
)
def test_what_the_schema_refuses_the_gateway_refuses(change: dict[str, Any]) -> None:
    assert not chat_schema().is_valid(BASE | change)
    with pytest.raises(HeadraceError):
        check(BASE | change)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"max_tokens": None, "temperature": None, "stop": None, "tools": None},
        {"stop": "x", "stream": True, "stream_options": {"include_usage": True}},
        {"stop": ["a", "b"], "foo": {"a": 1}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
    ],
)
def test_what_the_gateway_takes_the_schema_takes(change: dict[str, Any]) -> None:
    check(BASE | change)
    chat_schema().validate(BASE | change)

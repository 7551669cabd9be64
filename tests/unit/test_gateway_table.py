"""The table of APIs: every row is whole, and every file of an API has its row."""

import importlib
import json
import pkgutil
from typing import Any, get_args

import msgspec
import pytest

import gateway.apis
from contracts.errors import HeadraceError
from contracts.messages.base import Endpoint
from contracts.messages.frames import ErrorData
from contracts.messages.records import Manifest
from gateway.apis.api import Api
from gateway.apis.response_format import OPENAI
from gateway.apis.table import APIS, format_of

MANIFEST = Manifest(name="m", version="1", engine="vllm", context=4096, default_output_tokens=16)
USER = [{"role": "user", "content": "hi"}]
LEAST: dict[Endpoint, dict[str, Any]] = {
    "chat/completions": {"model": "m", "messages": USER},
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi"},
    "messages": {"model": "m", "messages": USER, "max_tokens": 7},
    "embeddings": {"model": "m", "input": "hi"},
}
"""The least body of each API."""

each_api = pytest.mark.parametrize("api", APIS.values(), ids=list(APIS))


def test_the_rows_are_the_endpoints_of_the_bus_and_each_file_has_one() -> None:
    assert list(APIS) == [api.endpoint for api in APIS.values()]
    assert set(APIS) == set(get_args(Endpoint)) == set(LEAST)
    modules = [
        importlib.import_module(f"gateway.apis.{found.name}") for found in pkgutil.iter_modules(gateway.apis.__path__)
    ]
    rows = [module.API for module in modules if isinstance(getattr(module, "API", None), Api)]
    assert {row.endpoint for row in rows} == set(APIS)
    assert len(rows) == len(APIS)


@each_api
def test_the_least_body_is_valid_and_travels_but_for_its_limit(api: Api) -> None:
    body = LEAST[api.endpoint]
    valid = api.validate(body, MANIFEST, None)
    assert valid.fields == {name: value for name, value in body.items() if name != "max_tokens"}
    assert (valid.choices, valid.stream) == (1, False)
    if api.streams:
        assert api.validate(body | {"stream": True}, MANIFEST, None).stream


@each_api
def test_a_body_without_its_prompt_or_its_model_is_refused_by_name(api: Api) -> None:
    for name in (api.prompt_field, "model"):
        body = {field: value for field, value in LEAST[api.endpoint].items() if field != name}
        with pytest.raises(HeadraceError) as caught:
            api.validate(body, MANIFEST, None)
        assert (caught.value.code, caught.value.param) == ("invalid_request", name)


@each_api
def test_no_field_that_callers_may_not_set_travels(api: Api) -> None:
    forbidden = {"cache_salt": "x", "priority": 1, "request_id": "x", "kv_transfer_params": {}, "vllm_xargs": {"a": 1}}
    assert not forbidden.keys() & set(api.body.__struct_fields__)
    assert not forbidden.keys() & api.validate(LEAST[api.endpoint] | forbidden, MANIFEST, None).fields.keys()


@each_api
def test_the_fields_that_a_row_names_are_in_its_body(api: Api) -> None:
    named = {api.prompt_field, api.limit_field} - {""}
    assert named <= set(api.body.__struct_fields__)
    assert bool(api.limit_field) is (api.validate(LEAST[api.endpoint], MANIFEST, None).max_output_tokens != 0)
    if api.chat is not None:
        assert api.chat(LEAST[api.endpoint], False)["messages"] == USER


@each_api
def test_events_and_errors_are_whole(api: Api) -> None:
    chunk = b'{"type":"a","x":1}'
    event = api.format.event(chunk)
    assert event.endswith(b"\n\n") and chunk in event
    failure = api.format.error_event(ErrorData(code="worker_lost", message="Gone."), "r-1", 2, 3)
    data = failure.removesuffix(b"\n\n").split(b"data: ")[1]
    assert json.loads(data)["error"]["message"] == "Gone."
    body = api.format.error_body("overloaded", "Full.", None, "r-1")
    assert json.loads(msgspec.json.encode(body))["error"]["message"] == "Full."


@each_api
def test_a_path_has_its_apis_format_whatever_follows_it(api: Api) -> None:
    for path in (api.path, f"{api.path}/", f"{api.path}/count_tokens"):
        assert format_of(path) is api.format
    assert format_of(f"{api.path}x") is OPENAI

"""Who can read the body of a request in quarantine."""

import base64
import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from compose.cli import quarantine
from contracts import sealed
from contracts.messages.attempts import Quarantined
from contracts.service.config import ConfigError, load
from scheduler.config import SchedulerConfig

SAMPLE = next(
    line
    for line in (Path(__file__).parent / "messages.v1.jsonl").read_text().splitlines()
    if '"message":"Quarantined"' in line
)
BODY = b'{"messages":[{"role":"user","content":"bad words"}]}'


def test_only_the_private_key_opens_what_the_public_one_sealed() -> None:
    private, public = sealed.new_keys()
    box = sealed.seal(BODY, public)
    assert b"bad words" not in box
    assert sealed.unseal(box, private) == BODY
    for data, key in ((box, sealed.new_keys()[0]), (box[:-1] + b"x", private), (b"", private), (box, "no key")):
        with pytest.raises(sealed.BadKey):
            sealed.unseal(data, key)
    for no_key in ("", "x", base64.b64encode(b"short").decode(), "é"):
        with pytest.raises(sealed.BadKey):
            sealed.seal(BODY, no_key)


def test_a_scheduler_does_not_start_with_a_bad_key() -> None:
    pepper = {"HEADRACE_PEPPER": "0" * 32}
    with pytest.raises(ConfigError, match="HEADRACE_QUARANTINE_PUBLIC_KEY is not a key"):
        load(SchedulerConfig, pepper | {"HEADRACE_QUARANTINE_PUBLIC_KEY": "secret"})
    assert load(SchedulerConfig, pepper).quarantine_public_key == ""


def test_the_command_makes_keys_and_shows_bodies_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(quarantine.app, arguments, catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    key_file = tmp_path / "key"
    public = run("keys", str(key_file)).strip().removeprefix("HEADRACE_QUARANTINE_PUBLIC_KEY=")
    assert key_file.stat().st_mode & 0o777 == 0o600
    with pytest.raises(quarantine.ComposeError, match="is there"):
        run("keys", str(key_file))

    kept = msgspec.convert(json.loads(SAMPLE)["json"], Quarantined)
    kept = msgspec.structs.replace(kept, sealed_body=sealed.seal(BODY, public))
    monkeypatch.setattr(quarantine, "on_bus", lambda *_: [kept])
    assert "bad words" not in run("show", "r-1")
    shown = json.loads(run("show", "r-1", "--key-file", str(key_file)))
    assert shown["request"]["body"] == json.loads(BODY)
    other = tmp_path / "other"
    run("keys", str(other))
    with pytest.raises(quarantine.ComposeError, match="does not open"):
        run("show", "r-1", "--key-file", str(other))

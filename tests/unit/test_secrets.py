"""Secrets as settings: from a file or the environment, never empty; and how the keys' peppers are read."""

from pathlib import Path

import pytest

from compose.stack.seeds import Seeds
from contracts.keys import Peppers
from contracts.service.config import ConfigError, Secret, ServiceConfig, load
from gateway.config import GatewayConfig
from ledger.config import LedgerConfig
from scheduler.config import SchedulerConfig
from worker.config import WorkerConfig

PEPPER = "0123456789abcdef" * 2


class Config(ServiceConfig, frozen=True, kw_only=True):
    word: Secret


def test_a_secret_stands_in_a_file_or_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "word").write_text(" open sesame\n")
    assert load(Config, {"HEADRACE_WORD_FILE": str(tmp_path / "word")}).word == "open sesame"
    assert load(Config, {"HEADRACE_WORD": "x"}).word == "x"


@pytest.mark.parametrize("kind", [GatewayConfig, SchedulerConfig, WorkerConfig, LedgerConfig])
def test_who_a_service_is_on_the_bus_stands_in_a_file_alone(kind: type[ServiceConfig], tmp_path: Path) -> None:
    seeds = Seeds(tmp_path)
    seeds.ensure(["worker-0"])
    seed = seeds.path("worker-0")
    settings = {"PEPPER": PEPPER, "MODEL": "m", "CLICKHOUSE_URL": "http://h:1", "NATS_SEED_FILE": str(seed)}
    environment = {f"HEADRACE_{name}": text for name, text in settings.items()}
    assert load(kind, environment).credentials.user == "worker-0"
    for content, reason in (("", "empty"), ("SUNOSEED", "no NKey seed"), (seed.read_text()[:-5], "no NKey seed")):
        seed.write_text(content)
        with pytest.raises(ConfigError, match=reason) as told:
            load(kind, environment)
        assert "headrace nats-config" in str(told.value) and not (content and content.strip() in str(told.value))
    for url in ("nats://scheduler:@h:4222", "nats://h:1,nats://a:b@i:1"):
        with pytest.raises(ConfigError, match="HEADRACE_NATS_SEED_FILE"):
            load(kind, environment | {"HEADRACE_NATS_URL": url})


def test_what_cannot_be_a_secret_is_told_without_saying_it(tmp_path: Path) -> None:
    file = tmp_path / "word"
    for content, reason in ((b"", "empty"), (b" \n", "empty"), (b"\xff\xfe", "not text")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"HEADRACE_WORD_FILE: .*{reason}"):
            load(Config, {"HEADRACE_WORD_FILE": str(file)})
    with pytest.raises(ConfigError, match="cannot be read"):
        load(Config, {"HEADRACE_WORD_FILE": str(tmp_path / "nowhere")})
    file.write_text("geheim")
    with pytest.raises(ConfigError, match="both set") as told:
        load(Config, {"HEADRACE_WORD_FILE": str(file), "HEADRACE_WORD": "streng"})
    assert "geheim" not in str(told.value) and "streng" not in str(told.value)


@pytest.mark.parametrize(
    ("kind", "settings", "named"),
    [
        (GatewayConfig, {"PEPPER": ""}, "HEADRACE_PEPPER"),
        (GatewayConfig, {"PEPPER": "too short"}, "HEADRACE_PEPPER"),
        (GatewayConfig, {"PEPPER": PEPPER + "\nshort"}, "HEADRACE_PEPPER"),
        (GatewayConfig, {"PEPPER": "\n".join([PEPPER] * 3)}, "HEADRACE_PEPPER"),
        (LedgerConfig, {"CLICKHOUSE_URL": "http://u:@h:1"}, "HEADRACE_CLICKHOUSE_URL"),
        (
            LedgerConfig,
            {"CLICKHOUSE_URL": "chdb:///d", "SQL_LISTEN": "h:1", "SQL_PASSWORD": ""},
            "HEADRACE_SQL_PASSWORD",
        ),
    ],
)
def test_an_empty_or_short_secret_ends_the_start(
    kind: type[ServiceConfig], settings: dict[str, str], named: str
) -> None:
    environment = {f"HEADRACE_{name}": text for name, text in ({"PEPPER": PEPPER} | settings).items()}
    with pytest.raises(ConfigError, match=named):
        load(kind, environment)


def test_two_peppers_give_two_places_the_current_one_first() -> None:
    old, new = Peppers.parse(PEPPER), Peppers.parse(f"{PEPPER[::-1]}\n\n{PEPPER}\n")
    assert new.hashes(b"hr_x")[1:] == old.hashes(b"hr_x")
    assert len(set(new.hashes(b"hr_x"))) == 2 and len(old.hashes(b"hr_x")) == 1

"""No secret of a running stack, and none that a caller shows it, stands where it could be read by others."""

import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.build_context import sent
from tests.support.stack import ROOT, Stack

TOKEN = re.compile(rb"(?<![/A-Za-z0-9_+-])[A-Za-z0-9_+-]{20,}={0,2}(?![/A-Za-z0-9_+-])")
HELLO = [{"role": "user", "content": "a-prompt-is-nobody-elses"}]


def files_of_secrets(data_dir: Path) -> Iterator[Path]:
    for pattern in ("secrets.json", "pepper", "key", "secrets/*", "**/*.seed"):
        yield from (path for path in data_dir.glob(pattern) if path.is_file())


@pytest.fixture(scope="module")
def secrets(stack: Stack) -> set[bytes]:
    """Keys, passwords, pepper and seeds of the stack, and of a new key."""
    known = {token for path in files_of_secrets(stack.data_dir) for token in TOKEN.findall(path.read_bytes())}
    run = stack.run
    known |= {run.key.encode(), run.admin_key.encode()}
    known.add(json.loads((stack.data_dir / "sql.json").read_text())["password"].encode())
    stack.cli_json("tenant", "create", "secretive")
    known.add(stack.cli_json("key", "create", "secretive")["key"].encode())
    with stack.admin() as admin:
        known.add(admin.post("/admin/v1/keys", json={"tenant": "secretive"}).json()["key"].encode())
    assert len(known) > 8
    return known


def misuse(stack: Stack, secret: str) -> None:
    """What callers do with a secret, rightly and wrongly; the answers do not matter."""
    model = {"model": stack.model, "max_tokens": 2, "messages": HELLO}
    wrong = secret[:-1] + "0"
    for key in (secret, wrong, f"{secret}é"):
        for url in (stack.run.url, stack.run.admin_url):
            headers = {b"Authorization": f"Bearer {key}".encode()}
            with httpx.Client(base_url=url, headers=headers, trust_env=False) as client:
                client.post("/v1/chat/completions", json=model)
                client.post("/v1/chat/completions", json=model | {"model": secret, "user": secret, "x": secret})
                client.post("/v1/chat/completions", content=f'{{"model": "{secret}" {secret}')
                client.post("/v1/chat/completions", json=model | {"stream": True}, headers={"X-Request-Id": secret})
                client.get(f"/v1/models/{secret}?api_key={secret}", headers={"X-Api-Key": secret})
                client.get(f"/admin/v1/keys/{secret}")
                client.post("/admin/v1/keys", json={"tenant": secret, "x": secret})
    sql = json.loads((stack.data_dir / "sql.json").read_text())
    for password in (sql["password"], secret):
        httpx.get(sql["url"], params={"user": secret, "password": password, "query": secret}, trust_env=False)
        httpx.post(sql["url"], auth=(sql["user"], password), content=f"SELECT '{secret}' + x", trust_env=False)
    raw(stack.run.url, f"GET /{secret} HTTP/9\r\n{secret}\r\n\r\n")
    raw(sql["url"], f"GET /{secret} HTTP/9\r\n{secret}\r\n\r\n")
    raw(stack.run.nats_url, f'CONNECT {{"user":"operator","pass":"{wrong}"}}\r\nPING\r\n{secret}\r\n')


def raw(url: str, text: str) -> None:
    address = httpx.URL(url)
    with suppress(OSError), socket.create_connection((address.host, address.port or 80), 10) as connection:
        connection.sendall(text.encode())
        while connection.recv(65536):
            pass


def test_no_log_environment_or_command_line_holds_a_secret(stack: Stack, secrets: set[bytes]) -> None:
    a_key, *_ = sorted(secret for secret in secrets if secret.startswith(b"hr_"))
    misuse(stack, a_key.decode())
    shown = {a_key[:-1] + b"0", HELLO[0]["content"].encode()}

    places = {str(path): path.read_bytes() for path in (stack.data_dir / "logs").iterdir()}
    places["the output of headrace up"] = stack.output.read_bytes()
    up = psutil.Process(stack.process.pid)
    processes = [up, *up.children(recursive=True)]
    assert {process.pid for process in processes} >= set(stack.pids)
    for process in processes:
        for name in ("environ", "cmdline"):
            places[f"{name} of {process.name()}"] = Path(f"/proc/{process.pid}/{name}").read_bytes()
    found = {place: [secret for secret in secrets | shown if secret in text] for place, text in places.items()}
    assert not {place: held for place, held in found.items() if held}


def test_no_file_of_a_secret_gets_into_an_image(stack: Stack) -> None:
    """Also with the data directory where it is by default, or inside of a folder that is copied."""
    kept = [str(path.relative_to(stack.data_dir)) for path in stack.data_dir.rglob("*") if path.is_file()]
    assert len(kept) > 10
    for place in (".headrace", "compose/.headrace", "gateway/data", "compose/deploy", "data"):
        got = sent([f"{place}/{name}" for name in kept], (ROOT / ".dockerignore").read_text())
        assert [path for path in got if not path.endswith("nats.conf")] == []


def test_who_is_not_the_owner_reads_no_secret(stack: Stack) -> None:
    for path in (stack.data_dir, *stack.data_dir.rglob("*")):
        with suppress(FileNotFoundError):
            assert path.stat().st_mode & 0o077 == 0, path

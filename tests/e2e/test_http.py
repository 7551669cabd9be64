"""HTTP as it is met in the field: behind nginx, over TLS, from plain curl."""

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.nginx import through
from tests.support.polling import wait_until
from tests.support.stack import Stack, StartStack, headrace

HELLO = [{"role": "user", "content": "one two three"}]


def test_c38_chunks_come_apart_through_nginx(nginx: str, stack: Stack) -> None:
    """nginx buffers by default; X-Accel-Buffering tells it not to."""
    script = {"tokens": ["a ", "b ", "c"], "itl_ms": 400}
    body = {"model": stack.model, "messages": HELLO, "stream": True, "simulate": script}
    with through(nginx, stack) as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        arrived = [time.monotonic() for line in response.iter_lines() if '"content":"' in line]
    assert len(arrived) >= 3
    assert arrived[-1] - arrived[0] > 0.5


def test_c24_large_bodies_and_errors_pass_nginx(nginx: str, stack: Stack) -> None:
    with through(nginx, stack) as client:
        large: dict[str, Any] = {
            "model": stack.model,
            "messages": [{"role": "user", "content": "x " * 400_000}],
            "max_tokens": 1,
        }
        large["simulate"] = {"ttft_ms": 1}
        assert client.post("/v1/chat/completions", json=large).status_code == 200
        refused = client.post("/v1/chat/completions", json={"model": "none", "messages": HELLO})
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
        wrong_key = client.get("/v1/models", headers={"Authorization": "Bearer no"})
        assert wrong_key.status_code == 401 and wrong_key.headers["x-request-id"]


def test_plain_curl_is_understood(stack: Stack) -> None:
    """``curl -d`` calls its body a form."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"model": stack.model, "messages": HELLO, "max_tokens": 2})
    command = [curl, "-s", "--noproxy", "*", f"{stack.run.url}/v1/chat/completions", "-d", body]
    done = subprocess.run(
        [*command, "-H", f"Authorization: Bearer {stack.run.key}"], capture_output=True, timeout=30, check=True
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "t0 t1"


# TLS -------------------------------------------------------------------------------------------------------


def certificate(directory: Path) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=headrace"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_d28_tls_by_certificate_files(start_stack: StartStack, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    stack = start_stack("--tls-cert", str(cert), "--tls-key", str(key))
    run = stack.run
    assert run.url.startswith("https://") and all(url.startswith("https://") for url in run.gateway_urls)
    trusted = ssl.create_default_context(cafile=str(cert))
    headers = {"Authorization": f"Bearer {run.key}"}
    with httpx.Client(base_url=run.url, headers=headers, verify=trusted, trust_env=False, timeout=30) as client:
        ready = client.get("/health/ready")
        assert ready.status_code == 200 and ready.headers["strict-transport-security"] == "max-age=31536000"
        body = {"model": "simulated", "messages": HELLO, "max_tokens": 3, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert list(response.iter_lines())[-2] == "data: [DONE]"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{run.url}/health/live", trust_env=False)  # Nobody vouches for the certificate.
    with socket.create_connection(("127.0.0.1", int(run.url.rsplit(":", 1)[1]))) as silent:  # It shakes no hands.
        assert httpx.get(f"{run.admin_url}/health/live", verify=trusted, trust_env=False).status_code == 200
        silent.sendall(b"GET / HTTP/1.1\r\n")
        silent.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP/" not in silent.recv(100)
    plain = run.url.replace("https", "http")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{plain}/v1/models", headers=headers, trust_env=False)
    _replace_the_certificate(stack, cert, key, tmp_path)


def _replace_the_certificate(stack: Stack, cert: Path, key: Path, tmp_path: Path) -> None:
    """D28: new connections see the new one, an open stream goes on; a broken file changes nothing."""
    host, port = stack.run.url.removeprefix("https://").split(":")

    def shown() -> str:
        return ssl.get_server_certificate((host, int(port)))

    before = shown()
    body = {"model": "simulated", "messages": HELLO, "max_tokens": 2000, "stream": True, "simulate": {"itl_ms": 20}}
    trusted = ssl.create_default_context(cafile=str(cert))
    headers = {"Authorization": f"Bearer {stack.run.key}"}
    with (
        httpx.Client(base_url=stack.run.url, headers=headers, verify=trusted, trust_env=False, timeout=30) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        (tmp_path / "new").mkdir()
        new_cert, new_key = certificate(tmp_path / "new")
        wanted = new_cert.read_text()
        new_key.rename(key)
        new_cert.rename(cert)
        wait_until(lambda: shown() == wanted, "the new certificate")
        assert wanted != before
        cert.write_text("broken")
        wait_until(lambda: "certificate_not_replaced" in stack.logs(100), "the broken file is told")
        assert shown() == wanted
        assert next(line for line in lines if line).startswith("data: {")


def test_half_of_tls_is_refused(tmp_path: Path) -> None:
    done = headrace("up", "--engine", "simulated", "--port", "0", "--data-dir", str(tmp_path), "--tls-cert", "nowhere")
    assert done.returncode == 1 and "TLS" in done.stdout + done.stderr

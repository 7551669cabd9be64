"""HTTP as it is met in the field: behind nginx, over TLS, from plain curl, on connections that rest."""

import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from tests.support.nats_server import free_port
from tests.support.polling import wait_until
from tests.support.stack import Stack, StartStack, headrace

HELLO = [{"role": "user", "content": "one two three"}]

NGINX = """
user root;
daemon off;
pid {directory}/pid;
error_log {directory}/error.log;
events {{}}
http {{
  access_log off;
  client_body_temp_path {directory}/a;
  proxy_temp_path {directory}/b;
  fastcgi_temp_path {directory}/c;
  uwsgi_temp_path {directory}/d;
  scgi_temp_path {directory}/e;
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass {url}; {settings} }}
  }}
}}
"""


@pytest.fixture
def nginx(stack: Stack, tmp_path: Path) -> Iterator[str]:
    """Address of an nginx with its defaults before the stack, but that it gives up after 30 s of silence."""
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if binary is None:
        pytest.skip("nginx is not installed")
    port = free_port()
    settings = "proxy_read_timeout 30s;"
    text = NGINX.format(directory=tmp_path, port=port, url=stack.run.url, settings=settings)
    (tmp_path / "nginx.conf").write_text(text)
    command = [binary, "-p", str(tmp_path), "-e", str(tmp_path / "error.log"), "-c", str(tmp_path / "nginx.conf")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _listens(port), f"nginx listens: {process.poll()}", 10)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGQUIT)
        process.wait(10)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _through(url: str, stack: Stack) -> httpx.Client:
    headers = {"Authorization": f"Bearer {stack.run.key}"}
    return httpx.Client(base_url=url, headers=headers, timeout=90, trust_env=False)


def test_c38_chunks_come_apart_through_nginx(nginx: str, stack: Stack) -> None:
    """nginx buffers by default; X-Accel-Buffering tells it not to."""
    script = {"tokens": ["a ", "b ", "c"], "itl_ms": 400}
    body = {"model": stack.model, "messages": HELLO, "stream": True, "simulate": script}
    with _through(nginx, stack) as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        arrived = [time.monotonic() for line in response.iter_lines() if '"content":"' in line]
    assert len(arrived) >= 3
    assert arrived[-1] - arrived[0] > 0.5


def test_c24_large_bodies_and_errors_pass_nginx(nginx: str, stack: Stack) -> None:
    with _through(nginx, stack) as client:
        large = {"model": stack.model, "messages": [{"role": "user", "content": "x " * 400_000}], "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=large).status_code == 200
        refused = client.post("/v1/chat/completions", json={"model": "none", "messages": HELLO})
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
        wrong_key = client.get("/v1/models", headers={"Authorization": "Bearer no"})
        assert wrong_key.status_code == 401 and wrong_key.headers["x-request-id"]


@pytest.mark.slow
def test_c21_a_stream_that_pauses_outlives_the_patience_of_nginx(nginx: str, stack: Stack) -> None:
    """40 s without a token, nginx cuts after 30 s of silence: comments bridge it, and the SDK reads over them."""
    script = {"tokens": ["a ", "b"], "ttft_ms": 1, "itl_ms": 40_000}
    transport = httpx.Client(trust_env=False, timeout=90)
    with openai.OpenAI(base_url=f"{nginx}/v1", api_key=stack.run.key, http_client=transport, max_retries=0) as client:
        stream = client.chat.completions.create(
            model=stack.model,
            messages=HELLO,  # type: ignore[arg-type]
            stream=True,
            extra_body={"simulate": script},
        )
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "a b"


@pytest.mark.parametrize("idle_s", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_c38_a_rested_connection_is_used_again(stack: Stack, idle_s: int) -> None:
    """200 times: the server must not close first, a client that posts at that moment would see a reset."""
    address = httpx.URL(stack.run.url)
    connections = [http.client.HTTPConnection(address.host, address.port, timeout=30) for _ in range(200)]
    body = json.dumps({"model": stack.model, "messages": HELLO, "max_tokens": 1})
    headers = {"Authorization": f"Bearer {stack.run.key}", "Content-Type": "application/json"}

    def post(connection: http.client.HTTPConnection) -> int:
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        response.read()
        connection.auto_open = 0  # From now on a lost connection is an error.
        return response.status

    with ExitStack() as closing, ThreadPoolExecutor(16) as pool:
        for connection in connections:
            closing.callback(connection.close)
        assert set(pool.map(post, connections)) == {200}
        time.sleep(idle_s)
        assert set(pool.map(post, connections)) == {200}


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


def test_tls_by_certificate_files(start_stack: StartStack, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    stack = start_stack("--tls-cert", str(cert), "--tls-key", str(key))
    run = stack.run
    assert run.url.startswith("https://") and all(url.startswith("https://") for url in run.gateway_urls)
    trusted = ssl.create_default_context(cafile=str(cert))
    headers = {"Authorization": f"Bearer {run.key}"}
    with httpx.Client(base_url=run.url, headers=headers, verify=trusted, trust_env=False, timeout=30) as client:
        assert client.get("/health/ready").status_code == 200
        body = {"model": "simulated", "messages": HELLO, "max_tokens": 3, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert list(response.iter_lines())[-2] == "data: [DONE]"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{run.url}/health/live", trust_env=False)  # Nobody vouches for the certificate.
    plain = run.url.replace("https", "http")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{plain}/v1/models", headers=headers, trust_env=False)


def test_half_of_tls_is_refused(tmp_path: Path) -> None:
    done = headrace("up", "--engine", "simulated", "--port", "0", "--data-dir", str(tmp_path), "--tls-cert", "nowhere")
    assert done.returncode == 1 and "TLS" in done.stdout + done.stderr

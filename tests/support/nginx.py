"""An nginx before a stack, as operators put one there."""

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.nats_server import free_port
from tests.support.polling import wait_until
from tests.support.stack import Stack

CONFIGURATION = """
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


@contextmanager
def nginx_before(url: str, directory: Path) -> Iterator[str]:
    """Address of an nginx with its defaults before ``url``, but that it gives up after 30 s of silence."""
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if binary is None:
        pytest.skip("nginx is not installed")
    port = free_port()
    text = CONFIGURATION.format(directory=directory, port=port, url=url, settings="proxy_read_timeout 30s;")
    (directory / "nginx.conf").write_text(text)
    command = [binary, "-p", str(directory), "-e", str(directory / "error.log"), "-c", str(directory / "nginx.conf")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: _listens(port), f"nginx listens: {process.poll()}")
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


def through(url: str, stack: Stack) -> httpx.Client:
    """A client that sends the stack's key to ``url``."""
    headers = {"Authorization": f"Bearer {stack.run.key}"}
    return httpx.Client(base_url=url, headers=headers, timeout=90, trust_env=False)

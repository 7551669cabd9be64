"""The table of permissions in contracts/PERMISSIONS.md is what the server is told."""

from pathlib import Path

import pytest

from contracts import permissions
from contracts.subjects import InvalidName

TABLE = Path(permissions.__file__).with_name("PERMISSIONS.md")


def test_the_table_is_drawn_from_the_permissions() -> None:
    head, table = TABLE.read_text().split("\n| Subject", 1)
    assert head.startswith("# ")
    assert "| Subject" + table == permissions.table(), "draw it again with contracts.permissions.table()"


def test_no_gateway_writes_what_people_manage() -> None:
    """Keys, tenants and models: it asks the admin service."""
    assert not any(subject.startswith("$KV.") for subject in permissions.of_user("gateway-0").publish)


def test_nothing_of_jetstream_is_a_tenants() -> None:
    assert not any("$" in subject for subject in permissions.of_tenant("T").publish)


@pytest.mark.parametrize(
    "name", ["emperor", "worker.0", "worker-", "worker-*", "worker->", "Worker", "", "t.x y", "worker-" + "x" * 41]
)
def test_a_name_that_says_no_role_is_no_users(name: str) -> None:
    with pytest.raises(InvalidName):
        permissions.of_user(name)

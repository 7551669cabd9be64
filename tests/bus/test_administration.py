"""The admin service and the audit trail, as who has taken over a gateway, or a bad operator, meets them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from compose.cli import audit as cli_audit
from contracts import audit, clock, ids, registry, subjects, topology
from contracts.administration import Administration
from contracts.audit import Actor
from contracts.bus import Bus, BusError
from contracts.errors import HeadraceError
from contracts.forms import KeyChange, NewKey, NewTenant, TenantChange
from contracts.keys import ADMIN_SCOPES, Peppers
from contracts.messages.administration import AdminAnswer, AdminCall, AuditEntry, FailedLogin, KeyActivity
from contracts.messages.records import KeyRecord
from scheduler.administration import FAILURES_PER_MIN, AdminService, FailureLog

OLD, NEW = "0123456789abcdef" * 2, "fedcba9876543210" * 2
PEPPERS = Peppers.parse(NEW)
BOTH = Peppers.parse(f"{NEW}\n{OLD}")
ADDRESS = "192.0.2.7"
OPERATOR = Actor(name="operator", address="test", via="cli")


class World:
    """One admin service, and whoever calls it."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.do = Administration(bus, OPERATOR, peppers=PEPPERS)
        self.tenant = ids.incarnation("t")

    async def key(self, *scopes: Any, **fields: Any) -> tuple[str, str]:
        """Id and secret of a new key."""
        made = await self.do.create_key(NewKey(tenant=self.tenant, scopes=scopes, **fields))
        return made.id, made.key

    async def ask(self, verb: str, secret: str, of: str = "", /, **form: Any) -> AdminAnswer:
        call = AdminCall(
            secret=secret, address=ADDRESS, request_id="r", target=of, form=msgspec.Raw(json.dumps(form).encode())
        )
        data = await self.bus.request(subjects.admin_call(verb), msgspec.json.encode(call), timeout_s=10)
        return msgspec.json.decode(data, type=AdminAnswer)

    async def code(self, verb: str, secret: str, of: str = "", /, **form: Any) -> str:
        answer = await self.ask(verb, secret, of, **form)
        return answer.error.code if answer.error else ""

    async def trail(self) -> list[AuditEntry]:
        return await audit.entries(self.bus)


@pytest.fixture
async def world(nats_url: str) -> AsyncIterator[World]:
    bus = await Bus.connect(nats_url, name="operator")
    await topology.ensure(bus)
    service = AdminService(bus, PEPPERS)
    await service.start()
    world = World(bus)
    await world.do.create_tenant(NewTenant(name=world.tenant))
    yield world
    await service.close()
    await bus.close()


async def test_an_action_is_done_for_a_key_of_its_area_and_recorded_twice(world: World) -> None:
    key_id, secret = await world.key("admin:tenants")
    answer = await world.ask("tenants.change", secret, world.tenant, weight=2)
    assert answer.error is None and json.loads(bytes(answer.result))["weight"] == 2
    intended, done = (await world.trail())[-2:]
    assert (intended.id, intended.result, intended.asked) == (done.id, "intended", {"weight": 2.0})
    assert (done.result, done.action, done.target, done.actor, done.address, done.via, done.request_id) == (
        "done", "tenants.change", world.tenant, key_id, ADDRESS, "api", "r",
    )  # fmt: skip
    assert (done.before, done.after) == ({}, {"weight": 2.0})


async def test_a_gateway_makes_no_key_without_one_that_may(world: World) -> None:
    """Whatever it sends: no secret, a guessed one, the hash of an admin key, a caller's inference key."""
    admin_id, admin = await world.key("admin:keys")
    _, caller = await world.key("inference", "usage")
    before = {record.id for record in await registry.keys(world.bus)}
    wanted: dict[str, Any] = {"tenant": world.tenant, "scopes": ["admin:keys"]}
    for secret in ("", "hr_guessed", PEPPERS.hashes(admin.encode())[0], admin_id):
        assert await world.code("keys.create", secret, **wanted) == "invalid_api_key"
    for action in ("keys.create", "tenants.create", "models.change"):
        assert await world.code(action, caller, **wanted) == "permission_denied"
    assert await world.code("tenants.create", admin, name="x") == "permission_denied"
    assert await world.code("nonsense.do", admin) == "not_found"
    assert {record.id for record in await registry.keys(world.bus)} == before
    refused = [entry for entry in await world.trail() if entry.actor and entry.reason == "scope"]
    assert [(entry.action, entry.address) for entry in refused[-4:]] == [("logins.failed", ADDRESS)] * 4


async def test_a_callers_key_cannot_crowd_the_trail_of_actions(world: World) -> None:
    """By way of a gateway that was taken over, as fast as the bus is."""
    _, caller = await world.key("inference", "usage")
    before = len(await world.trail())
    calls = 3 * FAILURES_PER_MIN
    assert {await world.code("tenants.create", caller, name="x") for _ in range(calls)} == {"permission_denied"}
    written = (await world.trail())[before:]
    assert {entry.action for entry in written} == {"logins.failed"} and len(written) < calls / 2


async def test_a_key_is_judged_by_the_service_itself(world: World) -> None:
    """Expired, revoked, from elsewhere, of a disabled tenant: each is refused and in the trail with its address."""
    now_ms = clock.now_ms()
    made = {
        "address": await world.key("admin:keys", addresses=("10.0.0.0/8",)),
        "expired": await world.key("admin:keys", expires_at_ms=now_ms + 60_000),
        "revoked": await world.key("admin:keys"),
    }
    await registry.change_key(
        world.bus, made["expired"][0], lambda key: msgspec.structs.replace(key, expires_at_ms=now_ms - 1)
    )
    await world.do.revoke_key(made["revoked"][0])
    for _, secret in made.values():
        assert await world.code("keys.create", secret, tenant=world.tenant) == "invalid_api_key"
    _, secret = made["tenant"] = await world.key("admin:tenants")
    await world.do.change_tenant(world.tenant, TenantChange(disabled=True))
    assert await world.code("tenants.change", secret, world.tenant, disabled=False) == "invalid_api_key"
    failed = {entry.reason: entry for entry in await world.trail() if entry.action == "logins.failed"}
    for reason, (key_id, _) in made.items():
        assert (failed[reason].actor, failed[reason].address) == (key_id, ADDRESS)


async def test_nobody_gives_or_takes_what_it_has_not(world: World) -> None:
    _, secret = await world.key("admin:keys")
    stronger, _ = await world.key(*ADMIN_SCOPES)
    everything: dict[str, Any] = {"tenant": world.tenant, "scopes": list(ADMIN_SCOPES)}
    assert await world.code("keys.create", secret, **everything) == "permission_denied"
    assert await world.code("keys.revoke", secret, stronger) == "permission_denied"
    assert await world.code("keys.change", secret, stronger, addresses=[]) == "permission_denied"
    assert await world.code("keys.create", secret, tenant=world.tenant, scopes=["admin:keys"]) == ""
    assert await world.code("keys.create", secret, tenant=world.tenant) == ""
    assert await world.code("keys.create", secret, tenant=world.tenant, scopes=["admin:keys", "inference"]) == (
        "invalid_request"
    )


async def test_what_the_trail_does_not_take_is_not_done(world: World) -> None:
    key_id, secret = await world.key("admin:tenants", "admin:keys")
    await world.bus.jetstream.api(f"STREAM.DELETE.{topology.AUDIT}")
    try:
        assert await world.code("tenants.change", secret, world.tenant, weight=3) == "unavailable"
        with pytest.raises(HeadraceError, match="audit trail"):
            await world.do.revoke_key(key_id)
    finally:
        await topology.ensure(world.bus)
    record = await registry.tenant(world.bus, world.tenant)
    assert record is not None and record.weight == 1.0
    assert not (await registry.key(world.bus, key_id)).revoked_at_ms


async def test_the_trail_only_grows(world: World) -> None:
    """Not even the operator takes an entry out."""
    before = len(await world.trail())
    [last] = [each async for each in world.bus.jetstream.read(topology.AUDIT, "audit.v1.tenants")][-1:]
    with pytest.raises(BusError, match="delete"):
        await world.bus.jetstream.delete(topology.AUDIT, last.stream_seq)
    with pytest.raises(BusError, match="purge"):
        await world.bus.jetstream.purge(topology.AUDIT, "audit.v1.>")
    for off in ({"deny_delete": False}, {"deny_purge": False}):
        config = next(stream for stream in topology.STREAMS if stream["name"] == topology.AUDIT)
        with pytest.raises(BusError, match="deny"):
            await world.bus.jetstream.api(f"STREAM.UPDATE.{topology.AUDIT}", {**config, **off})
    assert len(await world.trail()) == before


async def test_no_secret_is_in_the_trail(world: World) -> None:
    _, admin = await world.key("admin:keys")
    answer = await world.ask("keys.create", admin, tenant=world.tenant, note="for the batch job")
    made = json.loads(bytes(answer.result))
    await world.code("keys.create", "hr_a-mistyped-secret", tenant=world.tenant)
    stored = b"".join([each.data async for each in world.bus.jetstream.read(topology.AUDIT, "audit.v1.>")])
    assert made["id"].encode() in stored and b"for the batch job" in stored
    for secret in (admin, made["key"], "hr_", *PEPPERS.hashes(made["key"].encode())):
        assert secret.encode() not in stored


async def test_a_large_change_is_named_by_its_hash(world: World) -> None:
    names = [f"model-{number}" for number in range(1000)]
    await world.do.change_tenant(world.tenant, TenantChange(models=names))
    done = (await world.trail())[-1]
    assert set(done.after["models"]) == {"bytes", "sha256"} and done.after["models"]["bytes"] > 10_000


async def test_a_flood_of_failed_logins_takes_few_entries_and_no_actions_place(world: World) -> None:
    log = FailureLog(world.bus)
    before = len(await world.trail())
    failed = [FailedLogin(address=f"192.0.2.{number}", reason="unknown", count=7) for number in range(100)]
    for _ in range(20):
        await log.take(failed, 300)
    written = (await world.trail())[before:]
    assert len(written) <= FAILURES_PER_MIN + 20
    assert sum(entry.count for entry in written) + log._unlisted == 20 * (700 + 300)
    config = next(stream for stream in topology.STREAMS if stream["name"] == topology.AUDIT)
    assert config["max_msgs_per_subject"] > 0, "each area has room of its own"


async def test_uses_and_failures_come_from_gateways(world: World) -> None:
    key_id, _ = await world.key("inference")
    activity = KeyActivity(
        used={key_id: 120_000, "no.*.key": 1}, failed=[FailedLogin(address="192.0.2.9", reason="unknown", count=3)]
    )
    await world.bus.request(subjects.ADMIN_ACTIVITY, msgspec.json.encode(activity), timeout_s=10)
    shown = {record.id: record for record in await registry.keys(world.bus)}
    assert shown[key_id].last_used_at_ms == 120_000
    entry = (await world.trail())[-1]
    assert (entry.action, entry.address, entry.count, entry.result) == ("logins.failed", "192.0.2.9", 3, "refused")


async def kept_under_the_old(world: World) -> tuple[str, str]:
    secret = ids.api_key()
    record = KeyRecord(id="", tenant=world.tenant)
    changed = await registry.keep_key(world.bus, Peppers.parse(OLD), secret, record)
    assert changed.after is not None
    return changed.after.id, secret


async def places(bus: Bus, key_id: str) -> list[str]:
    return [place.rpartition(".")[2] for place in await bus.kv.all(topology.KEYS, f"{key_id}.*")]


async def test_a_key_moves_to_the_current_pepper(world: World) -> None:
    key_id, secret = await kept_under_the_old(world)
    await asyncio.gather(*(registry.move_key(world.bus, BOTH, secret.encode()) for _ in range(5)))
    assert await places(world.bus, key_id) == PEPPERS.hashes(secret.encode())
    [record] = await registry.keys_of_secret(world.bus, PEPPERS, secret.encode())
    assert (record.id, record.pepper) == (key_id, PEPPERS.name())
    assert await registry.keys_of_secret(world.bus, Peppers.parse(OLD), secret.encode()) == []


async def test_a_key_that_is_revoked_while_it_moves_stays_revoked(world: World) -> None:
    """The move has read the record before it was revoked."""
    key_id, secret = await kept_under_the_old(world)
    create = world.bus.kv.create

    async def revoke_first(*arguments: Any, **options: Any) -> int:
        await registry.change_key(world.bus, key_id, lambda key: msgspec.structs.replace(key, revoked_at_ms=1))
        return await create(*arguments, **options)

    world.bus.kv.create = revoke_first  # type: ignore[method-assign]
    await registry.move_key(world.bus, BOTH, secret.encode())
    assert [each.revoked_at_ms for each in await registry.keys_of_secret(world.bus, BOTH, secret.encode())] == [1]


async def test_a_key_in_two_places_is_revoked_in_both(world: World) -> None:
    key_id, secret = await kept_under_the_old(world)
    record = await registry.key(world.bus, key_id)
    place = f"{key_id}.{PEPPERS.hashes(secret.encode())[0]}"
    await world.bus.kv.create(topology.KEYS, place, msgspec.json.encode(record))
    await world.do.revoke_key(key_id)
    assert all(each.revoked_at_ms for each in await registry.keys_of_secret(world.bus, BOTH, secret.encode()))


async def test_who_shows_no_secret_cannot_have_a_key_moved(world: World) -> None:
    """A gateway that names hashes instead would put its own secret in an admin key's place."""
    key_id, secret = await kept_under_the_old(world)
    before = await places(world.bus, key_id)
    for forged in (before[0], key_id, "", f"{key_id}.{before[0]}"):
        await registry.move_key(world.bus, BOTH, forged.encode())
    assert await places(world.bus, key_id) == before
    assert await registry.keys_of_secret(world.bus, BOTH, secret.encode())


async def test_an_expired_key_can_still_be_revoked_and_no_key_is_made_expired(world: World) -> None:
    key_id, _ = await world.key("inference", expires_at_ms=clock.now_ms() + 60_000)
    await registry.change_key(world.bus, key_id, lambda key: msgspec.structs.replace(key, expires_at_ms=1))
    with pytest.raises(HeadraceError, match="passed"):
        await world.do.change_key(key_id, KeyChange(expires_at_ms=1))
    with pytest.raises(HeadraceError, match="passed"):
        await world.key("inference", expires_at_ms=1)
    assert (await world.do.revoke_key(key_id)).revoked_at_ms


async def test_a_key_is_moved_by_command(world: World) -> None:
    key_id, secret = await kept_under_the_old(world)
    do = Administration(world.bus, OPERATOR, peppers=BOTH)
    assert (await do.move_key(secret)).pepper == PEPPERS.name()
    assert await places(world.bus, key_id) == PEPPERS.hashes(secret.encode())
    done = (await world.trail())[-1]
    assert (done.action, done.target, done.after) == ("keys.move", key_id, {"pepper": PEPPERS.name()})
    with pytest.raises(HeadraceError, match="no such key"):
        await do.move_key("hr_unknown")


@pytest.mark.parametrize(
    "activity",
    [
        {"used": {f"key_{number}": 60_000 for number in range(1001)}},
        {"used": {"k" * 65: 60_000}},
        {"used": {"k": -1}},
        {"outdated": ["hr_x"] * 51},
        {"failed": [{"address": "a" * 65, "reason": "unknown"}]},
        {"failed": [{"address": "192.0.2.1", "reason": "unknown", "count": 2**60}]},
        {"failed": [{"address": "192.0.2.1", "reason": "\u001b[2J"}]},
    ],
)
async def test_a_report_beyond_its_bounds_is_dropped_whole(world: World, activity: dict[str, Any]) -> None:
    before = len(await world.trail())
    with pytest.raises(BusError):
        await world.bus.request(subjects.ADMIN_ACTIVITY, json.dumps(activity).encode(), timeout_s=0.3)
    assert len(await world.trail()) == before


async def test_a_use_from_the_future_is_now(world: World) -> None:
    key_id, _ = await world.key("inference")
    activity = KeyActivity(used={key_id: 2**62})
    await world.bus.request(subjects.ADMIN_ACTIVITY, msgspec.json.encode(activity), timeout_s=10)
    shown = {record.id: record for record in await registry.keys(world.bus)}
    assert 0 < shown[key_id].last_used_at_ms <= clock.now_ms()


def test_nothing_in_the_trail_acts_on_a_terminal() -> None:
    entry = AuditEntry(
        id="1", at_ms=1, actor="\x1b[2J", address="\r\n", via="api", action="logins.failed", target="\u202e",
        result="refused", after={"note": "\x07"},
    )  # fmt: skip
    assert all(cell.isprintable() for cell in cli_audit._row(entry))


async def test_a_record_that_the_server_was_made_to_copy_opens_nothing(world: World) -> None:
    """Who may only read records names a key of another bucket as where it wants the answer, twice over."""
    key_id, _ = await world.key(*ADMIN_SCOPES)
    [(place, entry)] = (await world.bus.kv.all(topology.KEYS, f"{key_id}.*")).items()
    await world.bus.publish(f"$KV.keys.{place}", entry.value)  # else its message id hinders a copy for two minutes
    read = "$JS.API.DIRECT.GET.KV_{bucket}.$KV.{bucket}.{key}"
    forged = f"key_forged.{PEPPERS.hashes(b'hr_of-the-thief')[0]}"
    richer = ids.incarnation("richer")
    record = await world.do.create_tenant(NewTenant(name=richer, monthly_budget_tokens=10**12))
    await world.bus.publish(f"$KV.tenants.{subjects.encode(richer)}", msgspec.json.encode(record))
    copies = (
        (read.format(bucket="keys", key=place), "$KV.tenants.stolen"),
        (read.format(bucket="tenants", key="stolen"), f"$KV.keys.{forged}"),
        (read.format(bucket="tenants", key=richer), "$KV.models.stolen"),
        (read.format(bucket="models", key="stolen"), f"$KV.tenants.{world.tenant}"),
        (read.format(bucket="keys", key=place), "audit.v1.keys"),
    )
    for source, target in copies:
        await world.bus.publish(source, b"", reply=target)
        await asyncio.sleep(0.1)  # the copy of the next line is made of this one
    for bucket, key in ((topology.KEYS, forged), (topology.TENANTS, world.tenant)):
        copy = await world.bus.kv.get(bucket, key)
        assert copy is not None and copy.value in (entry.value, msgspec.json.encode(record)), "the server has copied it"
    assert await world.code("keys.create", "hr_of-the-thief", tenant=world.tenant) == "invalid_api_key"
    assert "key_forged" not in {record.id for record in await registry.keys(world.bus)}
    assert await registry.tenant(world.bus, world.tenant) is None
    assert "stolen" not in {record.name for record in await registry.tenants(world.bus)}
    assert await world.trail()
    for bucket, key in ((topology.KEYS, forged), (topology.TENANTS, "stolen"), (topology.MODELS, "stolen")):
        await world.bus.kv.delete(bucket, key)


async def test_what_nobody_could_read_is_not_written(world: World) -> None:
    """A record beyond its bounds counts as absent: with it a tenant would be out."""
    networks = tuple(f"10.0.{number}.0/24" for number in range(64))
    key_id, _ = await world.key("inference", addresses=networks)
    assert len((await registry.key(world.bus, key_id)).addresses) == 64
    with pytest.raises(HeadraceError, match="addresses"):
        await world.do.change_key(key_id, KeyChange(addresses=(*networks, "10.1.0.0/16")))
    with pytest.raises(HeadraceError, match="more than is kept"):
        await world.do.change_tenant(world.tenant, TenantChange(models=[f"m{number}" for number in range(100_001)]))
    assert await registry.tenant(world.bus, world.tenant) is not None


async def test_the_trail_is_read_by_area_newest_first(world: World) -> None:
    _, tenants = await world.key("admin:tenants")
    _, keys = await world.key("admin:keys")
    _, prices = await world.key("admin:prices")
    for weight in (3, 4):
        assert await world.code("tenants.change", tenants, world.tenant, weight=weight) == ""

    async def seen(secret: str, **form: Any) -> list[dict[str, Any]]:
        answer = await world.ask("audit.list", secret, **form)
        assert answer.error is None
        found: list[dict[str, Any]] = json.loads(bytes(answer.result))["data"]
        return found

    changes = await seen(tenants, target=world.tenant, action="tenants")
    assert [entry["after"] for entry in changes[:2]] == [{"weight": 4.0}, {"weight": 3.0}]
    assert {entry.get("result") for entry in changes} == {"done"}, "what was intended and done is one line"
    assert len(await seen(tenants, limit=1)) == 1
    assert {entry["action"].partition(".")[0] for entry in await seen(keys)} <= {"keys", "logins"}
    assert {entry["action"].partition(".")[0] for entry in await seen(prices)} <= {"prices"}
    assert await seen(keys, action="tenants") == [], "another area is not there for it"
    _, caller = await world.key("inference")
    assert await world.code("audit.list", caller) == "permission_denied"


async def test_prices_are_set_by_their_own_scope_and_checked(world: World) -> None:
    _, secret = await world.key("admin:prices")
    _, other = await world.key("admin:models", "admin:usage")
    price = {"model": f"m-{world.tenant}", "input": "0.15", "output": "0.6"}
    assert await world.code("prices.set", other, **price) == "permission_denied"
    assert await world.code("prices.set", secret, **price, valid_from="2026-01-01") == "invalid_request", "it has begun"
    assert await world.code("prices.set", secret, **price | {"input": "1e99"}) == "invalid_request"
    assert await world.code("prices.set", secret, **price, currency="XAU") == "invalid_request"
    assert await world.code("prices.set", secret, **price, version="v9") == "not_found", "there is no such version"
    assert await world.code("prices.set", secret, **price, valid_from="2026-01-01", backdate=True) == ""
    listed = json.loads(bytes((await world.ask("prices.list", secret)).result))["data"]
    ours = [each for each in listed if each["model"] == price["model"]]
    assert [(each["tier"], each["input"], each["cached_input"]) for each in ours] == [
        ("batch", 150_000, 150_000),
        ("interactive", 150_000, 150_000),
    ]


async def test_quarantine_is_looked_at_and_cleared_by_way_of_the_admin_service(world: World) -> None:
    _, secret = await world.key("admin:models")
    assert await world.code("quarantine.list", secret) == ""
    assert await world.code("quarantine.drop", secret, "no-such-request") == "not_found"
    assert await world.code("quarantine.drop", secret, "*") == "not_found", "no wildcard"
    _, caller = await world.key("usage")
    assert await world.code("quarantine.list", caller) == "permission_denied"

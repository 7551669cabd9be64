"""What operators send: forms that refuse unknown fields, for a typing error in a limit would otherwise be silence.

Used by the admin API, the admin service and the command line alike. Pure.
"""

from typing import Any

import msgspec

from contracts.messages.base import Priority
from contracts.messages.records import AliasOrder, PriceTier, Scope, TenantLimits, TenantRecord
from contracts.messages.rollouts import By, Wanted


class Form(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base. A field that is left out stays as it is."""


def given(form: Form) -> dict[str, Any]:
    """The fields that were not left out."""
    return {name: value for name, value in msgspec.structs.asdict(form).items() if value is not msgspec.UNSET}


class LimitsChange(Form, frozen=True, kw_only=True):
    """Null is unlimited; a field that is left out stays as it is (for a new tenant: unlimited)."""

    rpm: int | msgspec.UnsetType | None = msgspec.UNSET
    input_tpm: int | msgspec.UnsetType | None = msgspec.UNSET
    output_tpm: int | msgspec.UnsetType | None = msgspec.UNSET
    concurrency: int | msgspec.UnsetType | None = msgspec.UNSET
    queued_requests: int | msgspec.UnsetType | None = msgspec.UNSET
    queued_tokens: int | msgspec.UnsetType | None = msgspec.UNSET

    def apply(self, limits: TenantLimits) -> TenantLimits:
        """The limits with what is given."""
        return msgspec.structs.replace(limits, **given(self))


class TenantChange(Form, frozen=True, kw_only=True):
    """What is left out stays as it is."""

    limits: LimitsChange = LimitsChange()
    model_limits: dict[str, LimitsChange | None] = {}
    """For one model, which else begins with the limits for all; null removes the model's own."""
    weight: float | msgspec.UnsetType = msgspec.UNSET
    models: list[str] | msgspec.UnsetType | None = msgspec.UNSET
    priorities: tuple[Priority, ...] | msgspec.UnsetType = msgspec.UNSET
    deadline_ms: int | msgspec.UnsetType = msgspec.UNSET
    monthly_budget_tokens: int | msgspec.UnsetType | None = msgspec.UNSET
    fallback: bool | msgspec.UnsetType = msgspec.UNSET
    price_ceiling: PriceTier | msgspec.UnsetType = msgspec.UNSET
    prefix_caching: bool | msgspec.UnsetType = msgspec.UNSET
    disabled: bool | msgspec.UnsetType = msgspec.UNSET

    def apply(self, record: TenantRecord) -> TenantRecord:
        """The record with what is given."""
        limits, own = self.limits.apply(record.limits), dict(record.model_limits)
        for model, change in self.model_limits.items():
            if change is None:
                own.pop(model, None)
            else:
                own[model] = change.apply(own.get(model, limits))
        return msgspec.structs.replace(record, **given(self) | {"limits": limits, "model_limits": own})


class NewTenant(TenantChange, frozen=True, kw_only=True):
    """A tenant that there is not yet."""

    name: str

    def record(self) -> TenantRecord:
        """The record that it becomes."""
        return self.apply(TenantRecord(name=self.name))


class AliasChange(Form, frozen=True, kw_only=True):
    """What an alias stands for from now on."""

    models: list[str] = []
    """Empty: all models."""
    order: AliasOrder = "listed"


class NewKey(Form, frozen=True, kw_only=True):
    """A key to be made."""

    tenant: str
    scopes: tuple[Scope, ...] = ("inference", "usage")
    """`inference` and `usage`, or areas of the administration with `usage`: an admin key does no inference."""
    addresses: tuple[str, ...] = ()
    """Networks such as `10.0.0.0/8` whose callers may use it; empty: all."""
    expires_at_ms: int = 0
    """Unix ms; 0: never."""
    note: str = ""
    """What people call it."""


class KeyChange(Form, frozen=True, kw_only=True):
    """What is left out stays as it is."""

    addresses: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    expires_at_ms: int | msgspec.UnsetType = msgspec.UNSET
    note: str | msgspec.UnsetType = msgspec.UNSET


class NewRollout(Form, frozen=True, kw_only=True):
    """A roll-out to be started."""

    to: str
    """The new version, which must be published."""
    steps: tuple[float, ...] = (1, 5, 25, 50, 100)
    """Shares in percent, each larger than the one before; at 100 the version becomes the stable one."""
    hold_ms: int = 600_000
    """Shortest time of a step."""
    by: By = "request"
    """What keeps its side, and what bad events are counted by."""
    tenants: tuple[str, ...] = ()
    """Only these; the last step then waits for `promote`. Empty: all."""
    shadow: float = 20.0
    """Percent of requests of which the new version gets a copy before any caller sees it; 0: none."""


class RolloutChange(Form, frozen=True, kw_only=True):
    """What is wanted of the open roll-out."""

    wanted: Wanted


class ModelChange(Form, frozen=True, kw_only=True):
    """What is left out stays as it is."""

    queued_requests: int | msgspec.UnsetType = msgspec.UNSET
    queued_tokens: int | msgspec.UnsetType = msgspec.UNSET
    tenant_queued_requests: int | msgspec.UnsetType = msgspec.UNSET
    tenant_queued_tokens: int | msgspec.UnsetType = msgspec.UNSET
    body_bytes: int | msgspec.UnsetType = msgspec.UNSET
    tenant_body_bytes: int | msgspec.UnsetType = msgspec.UNSET
    kv_overbooking: float | msgspec.UnsetType = msgspec.UNSET
    cached_input_share: float | msgspec.UnsetType = msgspec.UNSET
    replicas_min: int | msgspec.UnsetType = msgspec.UNSET
    replicas_max: int | msgspec.UnsetType | None = msgspec.UNSET
    replicas_spare: int | msgspec.UnsetType = msgspec.UNSET
    replicas_hold_s: int | msgspec.UnsetType = msgspec.UNSET
    fallbacks: list[str] | msgspec.UnsetType = msgspec.UNSET


class NewPrice(Form, frozen=True, kw_only=True):
    """Prices of a model from a day on, for a million tokens, as decimal numbers: `"0.15"`."""

    model: str
    """Or an adapter, which is one."""
    version: str = ""
    """Whose own price it is to be; empty: of all that have none of their own."""
    input: str
    output: str
    cached_input: str = ""
    """Empty: as input."""
    reasoning: str = ""
    """Empty: as output."""
    tier: Priority | None = None
    """Null: both."""
    valid_from: str = ""
    """UTC day, `2027-01-01`; empty: tomorrow."""
    currency: str = "USD"
    backdate: bool = False
    """Allow a day that has begun: it changes what was used already."""


class WorkerChange(Form, frozen=True, kw_only=True):
    """What a worker is to do."""

    model: str
    held: bool
    """Take nothing more, and let what runs end; or take work again."""


class RequestCancel(Form, frozen=True, kw_only=True):
    """Where the request is."""

    model: str


class TrailQuery(Form, frozen=True, kw_only=True):
    """Which of the newest entries of the audit trail."""

    action: str = ""
    """Only this action, `keys.create`, or area, `keys`."""
    actor: str = ""
    target: str = ""
    limit: int = 100

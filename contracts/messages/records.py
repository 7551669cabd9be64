"""Records in KV buckets: models and their versions, aliases, tenants, keys, prices, budgets."""

from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from contracts.messages.base import FEW, MANY, Endpoint, Line, Message, Name, Priority, Text, Whole
from contracts.shards import SHARDS_MAX


class PoolLimits(Message, frozen=True, kw_only=True):
    """Bounds of one model's queue, of one tenant's share of it, and of how many workers it should have."""

    queued_requests: int = 2000
    queued_tokens: int = 50_000_000
    tenant_queued_requests: int = 1000
    tenant_queued_tokens: int = 25_000_000
    body_bytes: int = 512 << 20
    """Of all open requests' bodies that are too large for a message: BODIES holds four such models."""
    tenant_body_bytes: int = 128 << 20
    """A tenant's share of it: eight of the largest bodies, a quarter of a model's."""
    kv_overbooking: float = 1.0
    """Reserved tokens on a worker may reach its KV capacity times this."""
    cached_input_share: float = 1.0
    """What a prompt token that was found in a cache counts in the tenants' input tokens a minute, 0 to 1."""
    replicas_min: int = 1
    """0: the model may go without a worker while nobody asks for it."""
    replicas_max: int | None = None
    replicas_spare: int = 1
    """More than are needed: so many may be lost and the others carry the load."""
    replicas_hold_s: int = 600
    """None is taken away before for so long no more were needed: a worker that left must be loaded again."""


class Artifact(Message, frozen=True, kw_only=True):
    """A file of a version, and the parts that it is stored in, each named by its own digest."""

    sha256: Line
    """Of the whole file, in hex."""
    size: Whole = 0
    """In bytes."""
    parts: Annotated[list[Line], MANY] = []
    """Sha256 of each PART_BYTES of it, in order; the last part is shorter."""


PART_BYTES = 16 << 20
"""Of a file's parts; never changed, for digests rest on it. 9,000 of them, in a manifest of 600 KB, are 140 GB."""


class Golden(Message, frozen=True, kw_only=True):
    """What the version's engine answered when it was published; a worker that answers otherwise serves nothing."""

    prompt: Text
    text: Text = ""
    """The greedy answer. Empty for a model without text: it must only answer."""
    tokens: Annotated[list[Whole], FEW] = []
    """Its token ids; where they are known, they are compared and not the text."""
    agreeing: Whole = 0
    """How many of the first ones must be the same, on whatever hardware; 0: all."""


class Base(Message, frozen=True, kw_only=True):
    """The version whose engine loads an adapter beside its own weights."""

    model: Name
    version: Name


Capability = Literal["tools", "json", "reasoning", "embeddings"]

PriceTier = Literal["economy", "standard", "premium"]
"""What a price ceiling is compared with. Prices themselves are the ledger's (Price)."""
PRICE_TIERS: tuple[PriceTier, ...] = get_args(PriceTier)
"""From cheap to dear."""


class Manifest(Message, frozen=True, kw_only=True):
    """A version of a model: an entry in the VERSIONS bucket, keyed ``<model>.<version>``, written once."""

    name: Name
    """The model's."""
    version: Name
    engine: Literal["vllm", "simulated"]
    context: int
    """Longest sequence in tokens, prompt and output."""
    default_output_tokens: int
    """Output limit of a request that states none."""
    artifacts: Annotated[dict[Line, Artifact], MANY] = {}
    """By path below the version's directory."""
    path: Line = ""
    """Directory, or URL of one, where the files lie as they are; empty: their parts are in ``store``."""
    store: Line = ""
    """URL of the store of parts; empty: the bus's own."""
    tokenizer_fingerprint: Line = ""
    """Of how it counts (contracts.fingerprint); empty where there are no files to count by."""
    endpoints: Annotated[tuple[Endpoint, ...], FEW] = ("chat/completions", "completions")
    capabilities: Annotated[tuple[Capability, ...], FEW] = ()
    price_tier: PriceTier = "standard"
    engine_arguments: Annotated[dict[Line, Any], FEW] = {}
    """The engine's own, over those that Headrace gives."""
    golden: Golden | None = None
    base: Base | None = None
    """It is a LoRA adapter of that one; None: it stands alone."""
    created_at_ms: int = 0


class ModelRecord(Message, frozen=True, kw_only=True):
    """A model's entry in the MODELS bucket, keyed by the encoded name: what an operator may change of it."""

    name: Name
    stable: Name
    """The version that is served unless a roll-out, a pin or an alias says otherwise."""
    limits: PoolLimits = PoolLimits()
    fallbacks: Annotated[list[Line], FEW] = []
    shards: Annotated[int, Meta(ge=1, le=SHARDS_MAX)] = 1
    """Owners that the model is split over (contracts.shards). ``limits`` are of each."""
    removed: bool = False
    """Nothing new is admitted; its owner deletes the entry once its last request has ended."""
    created_at_ms: int = 0


AliasOrder = Literal["listed", "cheapest", "dearest", "soonest"]
"""As the alias lists them; by price tier; by how many requests there are for each slot."""


class Alias(Message, frozen=True, kw_only=True):
    """An entry in the ALIASES bucket, keyed by the encoded name: it stands for the first model that fits and is up."""

    name: Name
    models: Annotated[list[Line], FEW] = []
    """Empty: all models."""
    order: AliasOrder = "listed"
    created_at_ms: int = 0


class TenantLimits(Message, frozen=True, kw_only=True):
    """Limits of a tenant for each model; None is unlimited, 0 lets nothing through. Buckets hold one minute's worth."""

    rpm: int | None = None
    input_tpm: int | None = None
    output_tpm: int | None = None
    concurrency: int | None = None
    queued_requests: int | None = None
    queued_tokens: int | None = None


class TenantRecord(Message, frozen=True, kw_only=True):
    """A tenant's entry in the TENANTS bucket, keyed by the encoded name."""

    name: Name
    limits: TenantLimits = TenantLimits()
    model_limits: Annotated[dict[Line, TenantLimits], MANY] = {}
    """Limits that replace ``limits`` for one model."""
    weight: float = 1.0
    models: Annotated[list[Line], MANY] | None = None
    """Models that the tenant may see; None is all."""
    priorities: Annotated[tuple[Priority, ...], FEW] = ("interactive", "batch")
    deadline_ms: int = 60_000
    """Default time to the first token."""
    monthly_budget_tokens: int | None = None
    fallback: bool = False
    """Whether an overloaded model's request may go to a fallback."""
    price_ceiling: PriceTier = "premium"
    """Dearer models are as if they were not there."""
    prefix_caching: bool = True
    disabled: bool = False
    created_at_ms: int = 0

    def limits_of(self, model: str) -> TenantLimits:
        """The limits that hold for ``model``."""
        return self.model_limits.get(model, self.limits)


Scope = Literal["inference", "usage", "admin:keys", "admin:tenants", "admin:models", "admin:usage", "admin:prices"]
"""What a key is for. ``usage`` is the own tenant's; ``admin:models`` is models' limits, roll-outs, what runs now and
quarantine; ``admin:usage`` is every tenant's. Each area of the administration has its part of the audit trail."""


class KeyRecord(Message, frozen=True, kw_only=True):
    """An API key's entry in the KEYS bucket, keyed ``<id>.<HMAC-SHA256 of the secret, hex>``. No secret here.

    It stands there twice for the moment in which it moves to a new pepper.
    """

    id: Name
    tenant: Name
    hash: Line = ""
    """The one of its key: a record that was copied to another place opens nothing there."""
    scopes: Annotated[tuple[Scope, ...], FEW] = ("inference", "usage")
    """Never ``inference`` beside one of ``admin:``."""
    addresses: Annotated[tuple[Line, ...], FEW] = ()
    """Networks (CIDR) whose callers may use it; empty: all."""
    expires_at_ms: int = 0
    """0: never."""
    note: Line = ""
    """What people call it."""
    pepper: Line = ""
    """Name of the pepper that the hash is under (contracts.keys)."""
    created_at_ms: int = 0
    revoked_at_ms: int = 0


class KeyUse(Message, frozen=True, kw_only=True):
    """A key's entry in the USES bucket, keyed by its id: when it was last used, to the minute."""

    used_at_ms: int


class Price(Message, frozen=True, kw_only=True):
    """An entry in the PRICES bucket, keyed ``<model>.<tier>.<valid_from>`` and ``.<version>`` where it is of one: valid
    until a later one of the same begins.

    Prices are whole millionths of the currency's unit for a million tokens.
    """

    model: Name
    """Or an adapter, which is one."""
    version: Name = ""
    """Whose own price it is; empty: of all that have none of their own."""
    tier: Priority
    valid_from: Name
    """UTC day, ``2026-11-29``."""
    currency: Name
    """``USD``; one currency for all prices."""
    input: int
    cached_input: int
    output: int
    reasoning: int
    created_at_ms: int = 0


class Budget(Message, frozen=True, kw_only=True):
    """A tenant's entry in the BUDGETS bucket, keyed by the encoded name: what was billed in a UTC month."""

    month: Name
    """``2026-11``; entries of earlier months are not cleared."""
    tokens: int
    """Prompt and completion tokens."""
    covers_seq: int = 0
    """Every end in ATTEMPTS up to this sequence number is counted, and some later ones may be."""


class Seen(Message, frozen=True, kw_only=True):
    """Tokens of billed ends, up to and with the sequence number ``seq`` of ATTEMPTS, after that of the entry before."""

    seq: int
    tokens: int


class Spending(Message, frozen=True, kw_only=True):
    """An entry in the SPENDING bucket, keyed ``<model>.<tenant>``: what the model's owner knows and the ledger may not.

    Of tenants with a budget, at most twice a second: for the owners of other models, and for the next one of this.
    """

    month: Name
    later: Annotated[list[Seen], FEW] = []
    """Billed ends that the ledger had not counted."""
    seq: int = 0
    """All ends of the model up to here are in ``later``, but for those that the ledger had counted."""
    reserved_tokens: int = 0
    """Of open requests."""


class Spendable(Message, frozen=True, kw_only=True):
    """What a tenant's requests spend of its limits."""

    requests: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    budget_tokens: float = 0.0
    """Of the monthly budget."""


class QuotaLease(Message, frozen=True, kw_only=True):
    """What one shard may spend of a tenant's limits without asking."""

    until_ms: int
    """By the bus's time, as owners have it. What is left then is lost, and refills as if it had been spent."""
    left: Spendable = Spendable()
    """When it was given."""
    low: Spendable = Spendable()
    """The least that was taken of the limits since: what is given back beyond it has refilled."""
    permits: int = 0
    """Requests that may be open at once."""
    short_at_ms: int = 0
    """Since when the shard has asked for what was not there; 0: it got all."""


class SharedQuota(Message, frozen=True, kw_only=True):
    """An entry in the QUOTAS bucket, keyed ``<model>.<tenant>``: a tenant's limits over all shards of a model.

    Written by the shards' owners, by compare-and-set (scheduler/core/quota_leases.py).
    """

    at_ms: int = 0
    month: Name = ""
    """Of ``taken.budget_tokens``."""
    taken: Spendable = Spendable()
    """Spent or leased, and not refilled since."""
    leases: Annotated[dict[Name, QuotaLease], FEW] = {}
    """By the shard's name."""

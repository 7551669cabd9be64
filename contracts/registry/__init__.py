"""Records that people manage: tenants, API keys, models and their versions, in KV buckets that every service watches.

How they are checked, read and written. Who may change them, and the trail of it, is contracts.administration's: nobody
else calls what writes here. Every function raises HeadraceError with what to change.
"""

from contracts.registry.base import Changed, check_name
from contracts.registry.key_records import (
    ShownKey,
    change_key,
    check_expiry,
    check_key,
    keep_key,
    keep_use,
    key,
    keys,
    keys_of_secret,
    move_key,
    read_key,
)
from contracts.registry.model_records import (
    change_model,
    check_version,
    find_model,
    find_version,
    identity,
    model,
    models,
    put_version,
    read_model,
    read_version,
    remove_model,
    remove_version,
    set_stable,
    version,
    versions,
)
from contracts.registry.tenant_records import (
    change_tenant,
    check_tenant,
    create_tenant,
    read_tenant,
    require_tenant,
    tenant,
    tenants,
)

__all__ = [
    "Changed",
    "ShownKey",
    "change_key",
    "change_model",
    "change_tenant",
    "check_expiry",
    "check_key",
    "check_name",
    "check_tenant",
    "check_version",
    "create_tenant",
    "find_model",
    "find_version",
    "identity",
    "keep_key",
    "keep_use",
    "key",
    "keys",
    "keys_of_secret",
    "model",
    "models",
    "move_key",
    "put_version",
    "read_key",
    "read_model",
    "read_tenant",
    "read_version",
    "remove_model",
    "remove_version",
    "require_tenant",
    "set_stable",
    "tenant",
    "tenants",
    "version",
    "versions",
]

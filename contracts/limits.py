"""A tenant's limits by the names that callers read, and what a limit of 0 means: nothing, from the first request on."""

from contracts.errors import HeadraceError
from contracts.messages.records import TenantLimits

NAMES = {
    "rpm": "requests per minute",
    "input_tpm": "input tokens per minute",
    "output_tpm": "output tokens per minute",
    "concurrency": "concurrent requests",
    "queued_requests": "queued requests",
    "queued_tokens": "queued tokens",
}
"""By field of TenantLimits."""


def refuse_zero(limits: TenantLimits, *, generates: bool) -> None:
    """Raises HeadraceError (permission_denied) when a limit of 0 lets no request through, however small it is.

    ``generates``: whether the request asks for output; one that does not needs none of that limit.
    """
    for field, name in NAMES.items():
        if getattr(limits, field) == 0 and (generates or field != "output_tpm"):
            raise HeadraceError(
                "permission_denied",
                f"The tenant's limit of {name} for this model is 0: nothing is admitted until an operator raises it.",
            )

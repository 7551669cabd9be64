"""How strongly bad events speak against a new version, or for it: e-values of their labels. Pure arithmetic.

A bad event happened; was it the canary's? With a share rho of all units, and versions equally good, it is with
probability rho. A canary that is m times as bad makes it ``theta0 = rho m / (rho m + 1 - rho)``. Against "at most m
times as bad" stands the e-value of k canary labels among n events, a mixture over all worse probabilities:

    e(k, n) = integral over (theta0, 1) of t^k (1 - t)^(n - k) dt / (1 - theta0) / (theta0^k (1 - theta0)^(n - k))

By Ville's inequality a version that is not worse ever reaches ``1 / alpha`` with a probability of at most alpha,
however often one looks, and whatever the rate of bad events does meanwhile, as long as it does so for both. The
reverse, over (0, theta0), speaks for the version. E-values of events at different shares are multiplied. (Howard et
al., Uniform boundaries, 2021; Lindon and Malek, Sequential tests for counts, 2020.)
"""

import math
from functools import lru_cache


def tolerated(share: float, ratio: float) -> float:
    """theta0: how many of all bad events are the canary's when it is ``ratio`` times as bad as stable."""
    return share * ratio / (share * ratio + 1 - share)


@lru_cache(1_024)  # Of most steps and criteria nothing has changed since the last look.
def log_against(canary: int, events: int, theta0: float) -> float:
    """Natural logarithm of the e-value against "at most theta0 of the bad events are the canary's"."""
    at_most, _ = _log_tails(canary, events + 1, theta0)
    return _log_beta(canary, events) + at_most - math.log1p(-theta0) - _log_null(canary, events, theta0)


@lru_cache(1_024)
def log_for(canary: int, events: int, theta0: float) -> float:
    """Natural logarithm of the e-value against "at least theta0 of them are": it speaks for the canary."""
    _, more = _log_tails(canary, events + 1, theta0)
    return _log_beta(canary, events) + more - math.log(theta0) - _log_null(canary, events, theta0)


def log_chance_of_more(found: int, tries: int, chance: float) -> float:
    """Natural logarithm of the probability of ``found`` or more successes in ``tries``."""
    return 0.0 if found <= 0 else _log_tails(found - 1, tries, chance)[1]


def _log_beta(canary: int, events: int) -> float:
    return math.lgamma(canary + 1) + math.lgamma(events - canary + 1) - math.lgamma(events + 2)


def _log_null(canary: int, events: int, theta0: float) -> float:
    return canary * math.log(theta0) + (events - canary) * math.log1p(-theta0)


def _log_tails(most: int, tries: int, chance: float) -> tuple[float, float]:
    """Logarithms of P(X <= most) and P(X > most) for a binomial X; the smaller one is summed, away from the middle.

    1 - I_x(k + 1, n - k + 1) = P(Binomial(n + 1, x) <= k): the incomplete beta function of whole numbers.
    """
    if most >= tries:
        return 0.0, -math.inf
    odds = chance / (1 - chance)
    below = most < tries * chance
    at = most if below else most + 1
    log_first = (
        math.lgamma(tries + 1)
        - math.lgamma(at + 1)
        - math.lgamma(tries - at + 1)
        + at * math.log(chance)
        + (tries - at) * math.log1p(-chance)
    )
    total = term = 1.0
    while term > total * 1e-17 and (at > 0 if below else at < tries):
        if below:
            term *= at / (tries - at + 1) / odds
            at -= 1
        else:
            term *= (tries - at) / (at + 1) * odds
            at += 1
        total += term
    log_small = min(log_first + math.log(total), -1e-300)
    log_large = math.log(-math.expm1(log_small))
    return (log_small, log_large) if below else (log_large, log_small)

"""Prices as people write them, and the coins of currencies; pure."""

from decimal import Decimal, InvalidOperation

from iso4217 import Currency

MICROS_MAX = 10**12


def digits_of(currency: str) -> int:
    """Decimal places of the currency's smallest coin, 0 to 4, as ISO 4217 lists them: 2 for ``USD``, 0 for ``JPY``.

    Raises ValueError for anything that is no code of a currency that is paid with.
    """
    try:
        exponent = Currency(currency).exponent
    except ValueError:
        exponent = None  # metals and funds have a code and no coin
    if exponent is None:
        raise ValueError(f"{currency!r} is no currency: say its code of ISO 4217, three capital letters, such as USD")
    return exponent


def micros(text: str) -> int:
    """A price such as ``0.15`` in whole millionths; raises ValueError."""
    try:
        number = Decimal(text) * 1_000_000
    except InvalidOperation as error:
        raise ValueError(f"{text!r} is not a number") from error
    if not (number.is_finite() and 0 <= number <= MICROS_MAX and number == number.to_integral_value()):
        raise ValueError(f"the price {text} is not from 0 to 1000000 with at most 6 digits after the point")
    return int(number)


def shown(micro: int) -> str:
    """Millionths as people write them."""
    return f"{Decimal(micro) / 1_000_000:f}"

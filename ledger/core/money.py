"""Money in whole picounits (10^-12 of the currency's unit), so that no sum is ever rounded; pure.

A price of one millionth of the unit for a million tokens is one picounit for one token.
"""

UNIT_PICO = 10**12
MICRO_PICO = 10**6


def decimal(pico: int) -> str:
    """The amount in the currency's unit, exact, without zeros at its end."""
    sign, pico = ("-", -pico) if pico < 0 else ("", pico)
    text = f"{pico // UNIT_PICO}.{pico % UNIT_PICO:012d}".rstrip("0").rstrip(".")
    return f"{sign}{text}"


def pico(text: str) -> int:
    """What ``decimal`` wrote, in picounits again."""
    whole, _, part = text.lstrip("-").partition(".")
    amount = int(whole) * UNIT_PICO + int(part.ljust(12, "0"))
    return -amount if text.startswith("-") else amount


def rounded(pico: int, digits: int) -> int:
    """The amount in picounits, brought to whole coins of so many decimal places; half a coin goes up."""
    coin = UNIT_PICO // 10**digits
    return (pico + coin // 2) // coin * coin


def coins(pico: int, digits: int) -> str:
    """An amount of whole coins, always with so many digits after the point."""
    sign, pico = ("-", -pico) if pico < 0 else ("", pico)
    part = f".{pico % UNIT_PICO // (UNIT_PICO // 10**digits):0{digits}d}" if digits else ""
    return f"{sign}{pico // UNIT_PICO}{part}"

"""Money in whole picounits (10^-12 of the currency's unit), so that no sum is ever rounded; pure.

A price of one millionth of the unit for a million tokens is one picounit for one token.
"""

UNIT_PICO = 10**12
MICRO_PICO = 10**6
CENT_PICO = UNIT_PICO // 100


def decimal(pico: int) -> str:
    """The amount in the currency's unit, exact, without zeros at its end."""
    sign, pico = ("-", -pico) if pico < 0 else ("", pico)
    text = f"{pico // UNIT_PICO}.{pico % UNIT_PICO:012d}".rstrip("0").rstrip(".")
    return f"{sign}{text}"


def cents(pico: int) -> int:
    """The amount in picounits, brought to whole cents; half a cent goes up."""
    return (pico + CENT_PICO // 2) // CENT_PICO * CENT_PICO


def whole_cents(pico: int) -> str:
    """An amount of whole cents, always with two digits after the point."""
    return f"{pico // UNIT_PICO}.{pico % UNIT_PICO // CENT_PICO:02d}"

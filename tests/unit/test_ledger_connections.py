"""Which connections to the SQL endpoint stay."""

import pytest

from ledger.sql_endpoint.connections import KNOWN_MAX, STRANGERS_MAX, STRANGERS_PER_ADDRESS_MAX, Connections, origin


def test_the_longest_waiting_of_an_address_makes_room() -> None:
    places = Connections[int]()
    for number in range(STRANGERS_PER_ADDRESS_MAX):
        assert places.opened(number, "10.0.0.1") is None
    assert places.opened(100, "10.0.0.2") is None
    assert places.opened(101, "10.0.0.1") == 0
    assert places.opened(102, "10.0.0.1") == 1


def test_who_holds_most_makes_room_when_all_is_taken() -> None:
    places = Connections[int]()
    assert places.opened(1000, "10.0.1.1") is None
    ended = [places.opened(number, f"10.0.0.{number // STRANGERS_PER_ADDRESS_MAX}") for number in range(200)]
    assert len([each for each in ended if each is None]) == STRANGERS_MAX - 1
    assert 1000 not in ended


def test_no_stranger_takes_a_known_ones_place() -> None:
    places = Connections[int]()
    for number in range(KNOWN_MAX):
        places.opened(number, "10.0.0.1")
        assert places.authenticated(number)
        assert places.authenticated(number), "each of its requests is"
    assert all((places.opened(number, "10.0.0.1") or 1000) >= 1000 for number in range(1000, 1200))
    assert not places.authenticated(1199), "all places are taken"
    places.closed(5)
    assert places.authenticated(1199)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8:0:1::1", "2001:db8::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "socket", False),
    ],
)
def test_an_address_is_what_one_caller_has(one: str, other: str, *, same: bool) -> None:
    assert (origin(one) == origin(other)) is same

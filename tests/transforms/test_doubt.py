"""The doubt of a size: what two factors and a power of one make of it."""

import pytest

from unitscale.transforms._doubt import DOUBT, MOST_ABOVE, MOST_DOUBT, UNKNOWN, Doubt, most


def test_factors_add_and_powers_multiply() -> None:
    assert Doubt(0.5, above=2.0) + Doubt(1.0, above=3.0) == Doubt(1.5, above=5.0)
    assert Doubt(0.5, above=2.0) * 2 == Doubt(1.0, above=4.0)
    assert most([Doubt(0.5, above=2.0), Doubt(1.0)]) == Doubt(1.0, above=2.0)
    assert most([]) == DOUBT


def test_within_is_in_both_parts() -> None:
    assert DOUBT.within(DOUBT)
    assert not Doubt(1.0).within(DOUBT)
    assert not Doubt(0.0, above=1.0).within(DOUBT)


def test_nothing_is_less_known_than_what_is_unknown() -> None:
    """So that loops, whose doubts add up, find a fixed point."""
    assert UNKNOWN + DOUBT == UNKNOWN * 3 == UNKNOWN * 0.5 == UNKNOWN
    far = Doubt(0.0, above=MOST_ABOVE)
    assert far + far == UNKNOWN


@pytest.mark.parametrize(
    ("doubt", "great"),
    [
        (DOUBT, False),
        (Doubt(MOST_DOUBT, above=MOST_ABOVE), False),
        (Doubt(MOST_DOUBT + 0.1), True),
        (Doubt(0.5, above=MOST_ABOVE + 0.1), True),
        (UNKNOWN, True),
    ],
)
def test_it_is_great_if_either_part_is(doubt: Doubt, great: bool) -> None:
    assert doubt.is_great == great

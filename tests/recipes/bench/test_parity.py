"""How many times fewer gradients are lost than by others, and what is asked of that."""

import pytest

from recipes.bench import parity
from recipes.bench._underflow import Underflow


@pytest.mark.parametrize(
    ("own", "other", "at_first", "at_the_end"),
    [(1, 10, True, True), (1, 9, False, True), (10, 9, False, False), (0, 5, True, True)],
)
def test_gain_is_the_ratio_of_shares(
    own: int, other: int, at_first: bool, at_the_end: bool
) -> None:
    ours, theirs = ([Underflow(100, lost, 0, 0, 0)] * 2 for lost in (own, other))
    rows = parity.lost(ours, theirs).rows
    assert [row["within"] for row in rows if "within" in row] == [at_first, at_the_end]
    assert rows[0]["share lost"] == own / 100


def test_nothing_lost_by_others_leaves_nothing_to_gain() -> None:
    none = [Underflow(100, 0, 0, 0, 0)] * 2
    assert parity.lost(none, none).rows[0]["within"] is False

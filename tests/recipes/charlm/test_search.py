from __future__ import annotations

import math

import pytest

from recipes.charlm.search import is_bracketed, missing, search


@pytest.mark.parametrize("best", [-9, -4, -1, 0, 3, 8])
def test_the_best_rate_is_found_and_bracketed_wherever_it_is(best) -> None:
    trained: list[int] = []

    def run(places):
        trained.extend(places)
        # Above the best the loss soon diverges, as it does with learning rates.
        return {p: math.inf if p > best + 2 else (p - best) ** 2 for p in places}

    losses = search({}, 5, 6, run)
    assert min(losses, key=lambda place: losses[place]) == best
    assert is_bracketed(losses)
    assert len(trained) == len(set(trained))
    assert len(trained) <= 15  # no further than one round beyond it


def test_divergence_everywhere_looks_below() -> None:
    found = {-1: math.inf, 0: math.inf, 1: math.inf}
    assert missing(found, 3, 2) == [-4, -3, -2]
    assert missing(found | {-4: 1.0, -3: 2.0, -2: math.inf}, 3, 2) == []
    assert not is_bracketed(found)


def test_the_number_of_rounds_bounds_a_search_without_an_optimum() -> None:
    losses = search({}, 3, 4, lambda places: {p: -float(p) for p in places})
    assert sorted(losses) == list(range(-1, 11))
    assert not is_bracketed(losses)


def test_a_round_that_was_cut_short_is_finished_first() -> None:
    assert missing({0: 1.0}, 5, 3) == [-2, -1, 1, 2]
    assert missing({-1: 3.0, 0: 2.0, 1: 1.0, 3: 4.0}, 3, 3) == [2, 4]

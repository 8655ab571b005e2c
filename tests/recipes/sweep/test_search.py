import math

from hypothesis import given, strategies as st

from recipes.sweep._search import missing

INF = math.inf


@given(best=st.integers(-9, 9), rates=st.integers(3, 6), known=st.sets(st.integers(-9, 9)))
def test_the_best_rate_is_found_and_bracketed_wherever_it_is(best, rates, known) -> None:
    """Whatever is known before, nothing is trained twice or far beyond the best."""

    def loss(place: int) -> float:
        # Above the best the loss soon diverges, as it does with learning rates.
        return INF if place > best + 2 else (place - best) ** 2

    losses, trained = {place: loss(place) for place in known}, []
    while places := missing(losses, rates, 8):
        trained += places
        losses |= {place: loss(place) for place in places}
    assert min(losses, key=lambda place: losses[place]) == best
    assert {best - 1, best, best + 1} <= set(losses)
    assert not known & set(trained)
    assert len(trained) == len(set(trained))
    assert set(trained) <= set(range(-abs(best) - rates - 1, abs(best) + rates + 2))


def test_divergence_everywhere_looks_below() -> None:
    found = {-1: INF, 0: INF, 1: INF}
    assert missing(found, 3, 2) == [-4, -3, -2]
    assert missing(found | {-4: 1.0, -3: 2.0, -2: INF}, 3, 2) == []


@given(rates=st.integers(3, 6), rounds=st.integers(1, 5))
def test_the_number_of_rounds_bounds_a_search_without_an_optimum(rates, rounds) -> None:
    losses: dict[int, float] = {}
    while places := missing(losses, rates, rounds):
        losses |= {place: -float(place) for place in places}
    low = -(rates // 2)
    assert sorted(losses) == list(range(low, low + rates * rounds))


def test_a_round_that_was_cut_short_is_finished_first() -> None:
    assert missing({0: 1.0}, 5, 3) == [-2, -1, 1, 2]
    assert missing({-1: 3.0, 0: 2.0, 1: 1.0, 3: 4.0}, 3, 3) == [2, 4]

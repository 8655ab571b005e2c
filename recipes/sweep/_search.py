"""Learning-rate search: rates in a geometric series, extended until the best is inside it."""

import math
from collections.abc import Mapping


def missing(losses: Mapping[int, float], rates: int, rounds: int) -> list[int]:
    """Which places of the series to train next; none when the search is over.

    Args:
      losses: Loss by place; place i is the start times the factor to the power i.
      rates: How many places one round has.
      rounds: How many rounds there may be.

    Returns:
      Places, in order. After the first round they are beside the end at which the loss is least;
      where every run diverged, at the lower end. A round that was cut short is finished first.

    Example:
      >>> missing({}, 3, 2), missing({-1: 3.0, 0: 2.0, 1: 1.0}, 3, 2)
      ([-1, 0, 1], [2, 3, 4])
      >>> missing({-1: 3.0, 0: 2.0, 1: 2.5}, 3, 2)
      []
    """
    low = -(rates // 2)
    high = low + rates - 1
    for _ in range(rounds):
        if todo := [place for place in range(low, high + 1) if place not in losses]:
            return todo
        best = min(range(low, high + 1), key=lambda place: losses[place])
        if best == high and math.isfinite(losses[best]):
            high += rates
        elif best == low or not math.isfinite(losses[best]):
            low -= rates
        else:
            return []
    return []

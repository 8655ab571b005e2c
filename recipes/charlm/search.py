"""Learning-rate search: rates in a geometric series, extended until the best is inside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping


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
    first = [place - rates // 2 for place in range(rates)]
    wanted = first
    for _ in range(rounds):
        todo = [place for place in wanted if place not in losses]
        if todo:
            return todo
        low, high = wanted[0], wanted[-1]
        reached = {place: losses[place] for place in range(low, high + 1)}
        finite = {place: loss for place, loss in reached.items() if math.isfinite(loss)}
        if finite:
            best = min(finite, key=lambda place: finite[place])
            if low < best < high:
                return []
            ahead = best == high
        else:
            ahead = False
        wanted = (
            [*wanted, *range(high + 1, high + 1 + rates)]
            if ahead
            else [*range(low - rates, low), *wanted]
        )
    return []


def is_bracketed(losses: Mapping[int, float]) -> bool:
    """Whether the least loss has a greater one on both sides."""
    finite = {place: loss for place, loss in losses.items() if math.isfinite(loss)}
    if not finite:
        return False
    best = min(finite, key=lambda place: finite[place])
    return best - 1 in losses and best + 1 in losses


def search(
    losses: dict[int, float], rates: int, rounds: int, run: Callable[[list[int]], dict[int, float]]
) -> dict[int, float]:
    """Runs what is missing until nothing is; `losses` is what is known already, and is extended."""
    while places := missing(losses, rates, rounds):
        losses.update(run(places))
    return losses

"""How far the size that is expected of data may be wrong, in powers of two."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

# 16-bit data may be off by this many powers of two before its size is read from it.
MOST_DOUBT = 4.0
# It may be larger by this many, of the 15 that float16 has above 1: sums of one sign are of like
# size, and have few elements far above their RMS.
MOST_ABOVE = 13.0


@dataclass(frozen=True)
class Doubt:
    """What an estimate of a size may be wrong by.

    Attributes:
        off: in either direction, if every factor was off by half.
        above: how much larger the size is if the terms of every product had one sign. They grow by
            their number then, not by its root: a matrix of probabilities times another.

    Example:
        >>> Doubt(0.5) + Doubt(1.0, above=5.0) * 2
        Doubt(off=2.5, above=10.0)
    """

    off: float
    above: float = 0.0

    def __add__(self, other: Doubt) -> Doubt:
        """The doubt of a product; great ones are all alike, so that loops have a fixed point."""
        total = Doubt(self.off + other.off, self.above + other.above)
        return UNKNOWN if total.is_great else total

    def __mul__(self, power: float) -> Doubt:
        """The doubt of a power."""
        return Doubt(0.0) + Doubt(self.off * power, self.above * power)

    def within(self, other: Doubt) -> bool:
        """Whether neither part is greater than that of another."""
        return self.off <= other.off and self.above <= other.above

    @property
    def is_great(self) -> bool:
        """Whether 16-bit data has to be measured."""
        return self.off > MOST_DOUBT or self.above > MOST_ABOVE


# A scale rounded to a power of two is off by half a power at most.
DOUBT = Doubt(0.5)
# Nothing is known of the size of data.
UNKNOWN = Doubt(math.inf)


def most(doubts: Iterable[Doubt]) -> Doubt:
    """The doubt of what may be as large as any of several values.

    Example:
        >>> most([Doubt(1.0), Doubt(0.5, above=3.0)])
        Doubt(off=1.0, above=3.0)
    """
    doubts = list(doubts) or [DOUBT]
    return Doubt(max(d.off for d in doubts), max(d.above for d in doubts))

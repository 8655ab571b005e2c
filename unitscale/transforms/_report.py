"""What a user may want to know of a scaled program: what left propagation, which scales vary."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Default:
    """One place in which the program left scale propagation for the default rule.

    Attributes:
        primitive: name of the primitive.
        source: ``file:line (function)`` of the user's code, where known.

    Example:
        >>> print(Default("cholesky", "model.py:7 (whiten)"))
        cholesky at model.py:7 (whiten)
    """

    primitive: str
    source: str

    def __str__(self) -> str:
        return f"{self.primitive} at {self.source}"


@dataclass(frozen=True)
class Exponent:
    """One scale that is known at run time only; all others are products of these.

    Attributes:
        maker: "argument", "result" (of which the scale is read from the data as it leaves), or the
            primitive at which a scale was read from data, or operands met at the larger scale.
        source: ``file:line (function)`` of the user's code; the path of an argument or a result.
        reason: why it is known at run time only, such as "the larger of two".

    Example:
        >>> print(Exponent("add", "model.py:7 (block)", "the larger of two"))
        add at model.py:7 (block): the larger of two
    """

    maker: str
    source: str
    reason: str = ""

    def __str__(self) -> str:
        place = f"{self.maker} at {self.source}" if self.source else self.maker
        return f"{place}: {self.reason}" if self.reason else place


class Report(list[Default]):
    """The default rules of a program, in its order, and beside them its exponents.

    Attributes:
        exponents: every scale that the program computes with at run time. What loops and inner
            functions make counts once for each time that it is traced.

    Example:
        >>> Report([Default("cholesky", "model.py:7 (whiten)")])
        Report(1 default rules, 0 exponents)
    """

    def __init__(self, defaults: Any = ()):
        """Starts with default rules and without exponents."""
        super().__init__(defaults)
        self.exponents: list[Exponent] = []

    def __repr__(self) -> str:
        return f"Report({len(self)} default rules, {len(self.exponents)} exponents)"

    def __str__(self) -> str:
        counts = Counter(self.exponents)
        exponents = [
            f"exponent: {e}" + (f", {n} times" if n > 1 else "") for e, n in counts.items()
        ]
        return "\n".join([*(f"default: {d}" for d in self), *exponents])

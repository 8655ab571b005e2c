"""Statistics of many values at once: sums over samples of them, one reduction for each size.

A program has thousands of values. A reduction of each would take minutes to compile; here samples
of one size are stacked, and a stack is reduced together.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ..core import Format

# Squares of small or large numbers leave float32's range: they are summed at these scales as well.
UP, DOWN = 2.0**60, 2.0**-60
# Values of a stack: more are compiled faster, and keep their samples in memory longer.
_TOGETHER = 16
# Elements beyond which a value is reduced where it is.
_LARGE = 2**17


class _Part(NamedTuple):
    """What of a value is reduced: a flat sample, and amax where that is not all of it."""

    index: int
    size: int
    sample: Any
    amax: Any | None


class ScaleSums:
    """Collects values, and computes a row of statistics for each.

    A row is the count of elements, sums of squares at three scales (1, `UP` and `DOWN`), the count
    of zeros, for each format the counts of elements that it makes zero, that lie below its normal
    numbers, and that exceed its largest, and amax.

    Args:
        formats: formats to count for.
        sample: elements that arrays of many more are measured on; None for all.

    Example:
        >>> sums = ScaleSums((), None)
        >>> sums.add(jnp.array([3.0, 0.0, -4.0]))
        >>> print(sums.rows()[:, [0, 1, 4, 5]])
        [[ 3. 25.  1.  4.]]
    """

    def __init__(self, formats: Sequence[Format], sample: int | None):
        self.formats, self.sample = formats, sample
        self.width = 6 + 3 * len(formats)
        self._count = 0
        self._waiting: dict[int, list[_Part]] = {}
        self._done: list[tuple[list[int], Any]] = []

    def __len__(self) -> int:
        return self._count

    def add(self, x: Any) -> None:
        """Takes a floating array."""
        x = jnp.asarray(x)
        part = _spread(x, self.sample).reshape(-1)
        amax = None if part.size == x.size else jnp.max(jnp.abs(x)).astype(jnp.float32)
        # The next power of two: few stacks, and at most half of one is padding.
        length = part.size if part.size > _LARGE else 1 << max(part.size - 1, 0).bit_length()
        alike = self._waiting.setdefault(length, [])
        alike.append(_Part(self._count, x.size, jnp.abs(part.astype(jnp.float32)), amax))
        self._count += 1
        if len(alike) == (_TOGETHER if length <= _LARGE else 1):
            self._reduce(length)

    def extend(self, rows: Any) -> None:
        """Takes rows (n, width) that are statistics already."""
        if len(rows):
            self._done.append(([*range(self._count, self._count + len(rows))], rows))
            self._count += len(rows)

    def rows(self) -> Any:
        """Returns float32 (n, width), in the order in which the values came."""
        for length in [*self._waiting]:
            self._reduce(length)
        if not self._done:
            return jnp.zeros((0, self.width), jnp.float32)
        order = np.argsort([i for indices, _ in self._done for i in indices])
        rows = jnp.concatenate([rows for _, rows in self._done])
        return rows if np.all(np.diff(order) == 1) else rows[order]

    def _reduce(self, length: int) -> None:
        parts = self._waiting.pop(length)
        padding = np.array([length - p.sample.size for p in parts], np.float32)
        stack = jnp.stack([jnp.pad(p.sample, (0, length - p.sample.size)) for p in parts])
        terms = [jnp.square(stack), jnp.square(stack * UP), jnp.square(stack * DOWN), stack == 0]
        padded = [0, 0, 0, 1]
        for f in self.formats:
            terms += [stack <= f.smallest_subnormal / 2, stack < f.smallest_normal, stack > f.max]
            padded += [1, 1, 0]
        operands = [*(term.astype(jnp.float32) for term in terms), stack]
        zero = np.zeros((), np.float32)
        # One reduction, which reads the stack once.
        *sums, amax = lax.reduce(tuple(operands), (zero,) * len(operands), _combine, (1,))
        shares = np.array([p.size / max(p.sample.size, 1) for p in parts], np.float32)
        columns = [
            (total - padding * pad) * shares for total, pad in zip(sums, padded, strict=True)
        ]
        if any(p.amax is not None for p in parts):
            amax = jnp.maximum(amax, jnp.stack([zero if p.amax is None else p.amax for p in parts]))
        sizes = np.array([p.size for p in parts], np.float32)
        rows = jnp.stack([jnp.asarray(sizes), *columns, amax], axis=1)
        self._done.append(([p.index for p in parts], rows))


def add_rows(a: Any, b: Any) -> Any:
    """Statistics of the elements of two rows, or of two sets of rows, together.

    Example:
        >>> print(add_rows(jnp.array([2.0, 1.0]), jnp.array([3.0, 4.0])))
        [5. 4.]
    """
    return jnp.append(a[..., :-1] + b[..., :-1], jnp.maximum(a[..., -1:], b[..., -1:]), axis=-1)


def over_iterations(rows: Any) -> Any:
    """Statistics over all iterations of those of each (iterations, n, width); zeros if none.

    Example:
        >>> print(over_iterations(jnp.array([[[2.0, 1.0]], [[3.0, 4.0]]])))
        [[5. 4.]]
    """
    amax = jnp.max(rows[..., -1:], axis=0, initial=0.0)
    return jnp.append(jnp.sum(rows[..., :-1], axis=0), amax, axis=-1)


def _combine(a: Any, b: Any) -> Any:
    sums = (x + y for x, y in zip(a[:-1], b[:-1], strict=True))
    return (*sums, lax.max(a[-1], b[-1]))


def _spread(x: Any, sample: int | None) -> Any:
    """At least ``sample`` elements, evenly spread over an array, or all if there are few more."""
    if sample is None or x.size < 2 * sample:
        return x
    step = x.size // sample
    # Odd, so that it meets every column of a matrix whose width is a power of two.
    return lax.slice(x.reshape(-1), (0,), (x.size,), (step - 1 + step % 2,))

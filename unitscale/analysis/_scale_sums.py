"""Statistics of values: sums over a sample of each, and its greatest magnitude."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..core import Format, amax

# Squares of small or large numbers leave float32's range: they are summed at these scales as well.
UP, DOWN = 2.0**60, 2.0**-60


class ScaleSums:
    """Collects values, and computes a row of statistics for each.

    A row is the count of elements, sums of squares at three scales (1, `UP` and `DOWN`), the count
    of zeros, for each format the counts of elements that it makes zero, that lie below its normal
    numbers, and that exceed its largest, and amax.

    Args:
        formats: formats to count for.
        sample: elements that arrays of many more are measured on; None for all.

    Attributes:
        rows: arrays (n, width) in the order in which the values came.

    Example:
        >>> sums = ScaleSums((), None)
        >>> sums.add(jnp.array([3.0, 0.0, -4.0]))
        >>> print(sums.together()[:, [0, 1, 4, 5]])
        [[ 3. 25.  1.  4.]]
    """

    def __init__(self, formats: Sequence[Format], sample: int | None):
        self.formats, self.sample = tuple(formats), sample
        self.rows: list[Any] = []

    def add(self, x: Any) -> None:
        """Takes a floating array."""
        elements, most, count = _sampled(x, self.sample)
        self.rows.append(_row(elements, most, np.float32(np.size(x)), count, self.formats))

    def extend(self, rows: Any) -> None:
        """Takes rows (n, width) that are statistics already."""
        self.rows.append(rows)

    def together(self) -> Any:
        """Returns all rows as one array, within a program that is traced."""
        width = 6 + 3 * len(self.formats)
        return jnp.concatenate([jnp.zeros((0, width), jnp.float32), *self.rows])


@functools.partial(jax.jit, static_argnums=1)
def _sampled(x: Any, sample: int | None) -> tuple[Any, Any, Any]:
    """Magnitudes of a sample, padded by zeros; amax of all; how many are no padding."""
    sharding = jax.typeof(x).sharding
    measure: Any = functools.partial(_magnitudes, sample=sample)
    if AxisType.Explicit in sharding.mesh.axis_types:
        # What devices share is gathered as the compiler finds best; sums are every device's.
        whole = NamedSharding(sharding.mesh, PartitionSpec())
        measure = jax.sharding.auto_axes(measure, out_sharding=(whole,) * 3)
    return measure(x)


def _magnitudes(x: Any, sample: int | None) -> tuple[Any, Any, Any]:
    """As `_sampled`. Padded to the next power of two, so that `_row` is compiled for few sizes."""
    part = jnp.abs(_spread(x, sample).reshape(-1).astype(jnp.float32))
    most = amax(x).astype(jnp.float32)
    length = 1 << max(part.size - 1, 0).bit_length()
    return jnp.pad(part, (0, length - part.size)), most, jnp.float32(part.size)


@functools.partial(jax.jit, static_argnums=4)
def _row(elements: Any, most: Any, size: Any, count: Any, formats: tuple[Format, ...]) -> Any:
    """One row (1, width), of all elements of which these are the sample."""
    padding = elements.size - count
    terms = [elements**2, (elements * UP) ** 2, (elements * DOWN) ** 2, elements == 0]
    padded = [0, 0, 0, 1]
    for f in formats:
        terms += [elements <= f.smallest_subnormal / 2, elements < f.smallest_normal]
        terms += [elements > f.max]
        padded += [1, 1, 0]
    operands = tuple(term.astype(jnp.float32) for term in terms)
    zero = np.zeros((), np.float32)
    # One reduction, which reads the sample once.
    sums = lax.reduce(operands, (zero,) * len(operands), _added, (0,))
    share = size / jnp.maximum(count, 1)
    columns = [(total - padding * pad) * share for total, pad in zip(sums, padded, strict=True)]
    return jnp.stack([size, *columns, most])[None]


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
    most = amax(rows[..., -1:], 0)[0]
    return jnp.append(jnp.sum(rows[..., :-1], axis=0), most, axis=-1)


def _added(a: Any, b: Any) -> Any:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _spread(x: Any, sample: int | None) -> Any:
    """At least ``sample`` elements, evenly spread over an array, or all if there are few more."""
    if sample is None or x.size < 2 * sample:
        return x
    step = x.size // sample
    # Odd, so that it meets every column of a matrix whose width is a power of two.
    return lax.slice(x.reshape(-1), (0,), (x.size,), (step - 1 + step % 2,))

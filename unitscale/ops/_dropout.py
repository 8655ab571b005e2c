"""Dropout that keeps unit variance."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from .. import rules
from ..core import ScaledArray, result_dtype, scale, upcast
from ._operands import ArrayLike, unpack


def dropout(
    x: ArrayLike,
    rate: float,
    *,
    key: jax.Array | None = None,
    deterministic: bool = False,
    broadcast_dims: Sequence[int] = (),
) -> ScaledArray:
    """Sets elements to zero at random.

    Scaling:
        data = (1 - rate)^1/2 * x.data * mask / (1 - rate), of unit variance; the scale is carried;
        backward the true derivative. When deterministic (evaluation), data = (1 - rate)^1/2 *
        x.data, the expected value of the above. See `rules.dropout`.

    Args:
        x: floating array or ScaledArray.
        rate: probability of zero, in [0, 1).
        key: `jax.random` key; not needed if deterministic or rate is 0.
        deterministic: whether to apply the expected value in place of a random mask.
        broadcast_dims: dimensions along which all elements are dropped together.

    Returns:
        ScaledArray of the shape and dtype of ``x`` (bfloat16 for 8-bit data).

    Raises:
        ValueError: if the rate is out of range, or the key is missing.

    Example:
        >>> y = dropout(jnp.ones(1000), 0.75, key=jax.random.key(0))
        >>> print(sorted(set(y.data.tolist())))
        [0.0, 2.0]

    References:
        Srivastava et al., "Dropout", JMLR 2014;
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (dropout).
    """
    data, x_scale = unpack("dropout", "x", x)
    data = upcast(data, result_dtype(data))
    factor = rules.dropout(rate).fwd
    if rate == 0:
        return ScaledArray(data, x_scale)
    if deterministic:
        return ScaledArray(scale(data, factor, factor), x_scale)
    if key is None:
        raise ValueError(
            "unitscale.ops.dropout: key must be a jax.random key unless deterministic=True; "
            "got None"
        )
    alike = {dim % data.ndim for dim in broadcast_dims}
    shape = [1 if i in alike else n for i, n in enumerate(data.shape)]
    mask = jax.random.bernoulli(key, 1 - rate, shape)
    kept = factor / (1 - rate)
    return ScaledArray(jnp.where(mask, scale(data, kept, kept), 0.0), x_scale)

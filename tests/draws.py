"""Whether an op is unit scaled, to within what its draws and those of its factors leave open."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Of a normal error; beyond it lie 6 of 100 000.
DEVIATIONS = 4.0


def check_unit(
    op: Callable[..., jax.Array], example: Sequence[Any], *, seeds: int, draws: int = 64
) -> None:
    """Asserts that the mean squares of an op's result and gradients are 1 within sampling error.

    The mean over draws and the simulated factor are both estimates, from ``draws`` and ``seeds``
    draws of the same mean square: their difference has the standard error of one draw times
    (1 / draws + 1 / seeds)^1/2. That of one draw is estimated from the draws.

    Args:
        op: function of arrays, returning an array; of a scalar only the gradients are checked.
        example: its arguments; floating ones are drawn, others are used as they are.
        seeds: draws that the op's factors were estimated from.
        draws: draws of the check.
    """
    floats = [i for i, x in enumerate(example) if jnp.issubdtype(x.dtype, jnp.floating)]

    def squares(key: jax.Array) -> jax.Array:
        *keys, last = jax.random.split(key, len(floats) + 1)
        args = [jax.random.normal(k, example[i].shape) for k, i in zip(keys, floats, strict=True)]

        def of_floats(*xs: jax.Array) -> jax.Array:
            full = list(example)
            for i, x in zip(floats, xs, strict=True):
                full[i] = x
            return op(*full)

        y, vjp = jax.vjp(of_floats, *args)
        if y.ndim == 0:
            return jnp.stack([jnp.mean(g**2) for g in vjp(jnp.ones(()))])
        return jnp.stack([jnp.mean(x**2) for x in (y, *vjp(jax.random.normal(last, y.shape)))])

    keys = jax.random.split(jax.random.key(2026), draws)
    found = np.asarray(jax.jit(lambda k: jax.lax.map(squares, k))(keys), np.float64)
    error = found.std(axis=0, ddof=1) * (1 / draws + 1 / seeds) ** 0.5
    assert (error < 0.1).all(), f"too few draws to tell: standard errors {error}"
    off = np.abs(found.mean(axis=0) - 1) / error
    assert (off <= DEVIATIONS).all(), f"mean squares {found.mean(axis=0)}, {off} errors from 1"

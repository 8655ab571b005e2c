"""Factors by simulation, for functions that no rule knows.

A rule is an expectation over unit normal inputs and cotangents. Where nobody has worked it out, it
can be estimated: over draws, with the interval that the draws leave open.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._compile_time import compile_time
from ._factors import Factors

_NORMAL = 1.959964  # of a two-sided 95 percent interval


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Ideal factors of a function, estimated from draws.

    Attributes:
        factors: the estimates; `bwd` has one factor per floating argument. Unconstrained.
        fwd_interval: 95 percent confidence interval of the forward factor.
        bwd_intervals: that of each backward factor.
        is_loss: whether the result is a scalar, whose forward factor is 1.

    Example:
        >>> import numpy as np
        >>> simulate(jnp.negative, [np.zeros(4096)]).is_loss
        False
    """

    factors: Factors
    fwd_interval: tuple[float, float]
    bwd_intervals: tuple[tuple[float, float], ...]
    is_loss: bool


def is_floating(x: Any) -> bool:
    """Whether an argument is a floating array (or has its type), and so is drawn.

    Example:
        >>> is_floating(np.zeros(2)), is_floating(np.arange(2))
        (True, False)
    """
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def simulate(
    fn: Callable[..., Any], example: Sequence[Any], *, seeds: int = 32, name: str = "simulate"
) -> Simulation:
    """Estimates the ideal factors of a function by simulation.

    Scaling:
        Forward 1 / std(fn(x)), and for each floating argument backward 1 / RMS of its gradient,
        with arguments and cotangent from N(0, 1), over all elements and draws. A scalar result is a
        loss: forward 1, cotangent 1, so that the 1 / N of a mean is in its gradient. The intervals
        are Student's, over the mean squares of the draws.

    Args:
        fn: ``fn(*args)``, differentiable, returning one floating array.
        example: its arguments: of floating arrays the shapes count, others are used as they are.
        seeds: number of draws, at least 2.
        name: what messages call the caller.

    Returns:
        `Simulation`.

    Raises:
        TypeError: if ``fn`` is no function that JAX can trace, ``example`` is one array, or the
            result is not one floating array.
        ValueError: if no argument is floating, there are fewer than two seeds, the function has
            side effects, or result or a gradient is constant or not finite.

    Example:
        >>> import numpy as np
        >>> found = simulate(jnp.matmul, [np.zeros((64, 16)), np.zeros((16, 64))])
        >>> bool(abs(found.factors.fwd - 0.25) < 0.01)
        True

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, empirical factors.
    """
    where = f"unitscale.{name}"
    if seeds < 2:
        raise ValueError(f"{where}: seeds must be at least 2, for an interval; got {seeds}")
    if not callable(fn):
        raise TypeError(f"{where}: expected a function; got {type(fn).__name__}")
    if hasattr(example, "dtype"):
        raise TypeError(
            f"{where}: expected a sequence of example arguments; got one array. Put it in a list."
        )
    example = [jnp.asarray(x) if isinstance(x, float | int) else x for x in example]
    floats = [i for i, x in enumerate(example) if is_floating(x)]
    if not floats:
        raise ValueError(
            f"{where}: expected a floating argument; got {len(example)} arguments, none floating. "
            "Factors belong to functions that have a gradient."
        )

    def of_floats(*xs: jax.Array) -> Any:
        full = list(example)
        for i, x in zip(floats, xs, strict=True):
            full[i] = x
        return fn(*full)

    shapes = [jax.ShapeDtypeStruct(np.shape(example[i]), np.float32) for i in floats]
    out = _traced(where, of_floats, shapes)
    if not isinstance(out, jax.ShapeDtypeStruct) or not is_floating(out):
        raise TypeError(
            f"{where}: expected a function that returns one floating array; got {out}. Return the "
            "array alone."
        )
    is_loss = out.shape == ()

    def draw(key: jax.Array) -> jax.Array:
        *keys, last = jax.random.split(key, len(floats) + 1)
        xs = [jax.random.normal(k, s.shape) for k, s in zip(keys, shapes, strict=True)]
        y, vjp = jax.vjp(of_floats, *xs)
        cotangent = jnp.ones(()) if is_loss else jax.random.normal(last, out.shape)
        grads = vjp(cotangent.astype(out.dtype))
        wide = [x.astype(jnp.float32) for x in (y, *grads)]
        return jnp.stack([jnp.mean(wide[0]), *(jnp.mean(jnp.square(x)) for x in wide)])

    # Inside of a trace of jit the factors are still needed as Python floats, now.
    with compile_time():
        keys = jax.random.split(jax.random.key(0), seeds)
        means, squares, *gradients = np.asarray(jax.jit(lambda k: jax.lax.map(draw, k))(keys)).T
    mean = means.mean(dtype=np.float64)
    spread = squares.astype(np.float64) - 2 * mean * means + mean**2
    fwd = (1.0, (1.0, 1.0))
    if not is_loss:
        fwd = _factor(where, "its result", spread, float(np.mean(squares)))
    bwd = [
        _factor(where, f"the gradient of argument {i}", g.astype(np.float64), 0.0)
        for i, g in zip(floats, gradients, strict=True)
    ]
    return Simulation(
        Factors(fwd[0], tuple(f for f, _ in bwd)), fwd[1], tuple(i for _, i in bwd), is_loss
    )


def _traced(where: str, fn: Callable[..., Any], shapes: Sequence[Any]) -> Any:
    """The type of a function's result."""
    try:
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*shapes)
    except jax.errors.JAXTypeError as error:
        raise TypeError(
            f"{where}: expected a function that JAX can trace; got one that needs the values of "
            f"its arguments ({str(error).splitlines()[0]}). Use jax.lax.cond or jnp.where for "
            "choices."
        ) from error
    if closed.effects:
        raise ValueError(
            f"{where}: expected a function without side effects; got one that every draw would "
            "repeat. Remove jax.debug.print, callbacks and Refs from it for this."
        )
    return out


def _factor(
    where: str, what: str, squares: np.ndarray, noise: float
) -> tuple[float, tuple[float, float]]:
    """1 / root of the mean of mean squares, and its interval."""
    mean = float(squares.mean())
    if not math.isfinite(mean):
        raise ValueError(
            f"{where}: {what} is not finite for unit normal inputs. Restrict the function's "
            "domain, for example by softplus or abs inside of it."
        )
    if mean <= 8 * float(np.finfo(np.float32).eps) ** 2 * noise or mean == 0:
        raise ValueError(
            f"{where}: {what} is constant for unit normal inputs, so no factor makes it unit. "
            "Close over an argument that has no gradient."
        )
    freedom = squares.size - 1
    quantile = _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * freedom)
    half = quantile * float(squares.std(ddof=1)) / math.sqrt(squares.size)
    low = mean + half
    high = max(mean - half, mean * 1e-6)
    return 1 / math.sqrt(mean), (1 / math.sqrt(low), 1 / math.sqrt(high))

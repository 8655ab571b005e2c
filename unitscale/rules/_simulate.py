"""Factors of arbitrary functions: from the rule of a recognized function, or by simulation."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import is_floating, is_scaled
from ._elementwise import compile_time, elementwise
from ._linear import Factors, matmul
from ._residual import add
from ._softmax import softmax

_NORMAL = 1.959964  # normal quantile of a two-sided 95 percent interval


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Ideal factors of a function, estimated from random inputs.

    Attributes:
        factors: The estimates; `bwd` has one factor per floating argument.
        fwd_interval: 95 percent confidence interval of the forward factor.
        bwd_intervals: The interval of each backward factor.
        is_loss: Whether the result is a scalar, whose forward factor is 1.
    """

    factors: Factors
    fwd_interval: tuple[float, float]
    bwd_intervals: tuple[tuple[float, float], ...]
    is_loss: bool


def closed_form(fn: Callable[..., Any], example: Sequence[Any]) -> Factors | None:
    """Return the unconstrained factors of a function that has a known rule, or None.

    Scaling:
        Rules are known for matmul (of matrices), softmax, add, and every element-wise function of
        one array. All arguments must be floating; only the shapes in `example` matter.

    Example:
        >>> round(closed_form(lambda x: jnp.tanh(x), [np.zeros(3)]).fwd, 3)
        1.593
    """
    if not all(map(is_floating, example)):
        return None
    shapes = [np.shape(x) for x in example]
    if fn in (jnp.matmul, jnp.dot, jax.lax.dot) and [len(s) for s in shapes] == [2, 2]:
        return matmul(shapes[0][0], shapes[0][1], shapes[1][1], constraint=None)
    if fn is jax.nn.softmax and len(shapes) == 1 and shapes[0]:
        return softmax(shapes[0][-1], constraint=None)
    if fn in (jnp.add, jax.lax.add) and len(shapes) == 2 and shapes[0] == shapes[1]:
        return add(constraint=None)
    if len(shapes) == 1 and _is_elementwise(fn, shapes[0]):
        with contextlib.suppress(TypeError, ValueError):
            return elementwise(fn, constraint=None)
    return None


def _is_elementwise(fn: Callable[..., Any], shape: tuple[int, ...]) -> bool:
    """Return whether a function and its derivative act on each entry separately."""
    x, dx = np.random.default_rng(0).standard_normal((2, *shape)).astype(np.float32)
    try:
        if jax.make_jaxpr(fn)(x).effects:
            return False
        with compile_time():
            whole = jax.jit(lambda *point: jax.jvp(fn, point[:1], point[1:]))(x, dx)
            alone = jax.jit(jax.vmap(lambda *point: jax.jvp(fn, point[:1], point[1:])))(
                x.ravel(), dx.ravel()
            )
            return all(
                a.shape == shape and np.allclose(a.ravel(), b, rtol=1e-5, atol=1e-6, equal_nan=True)
                for a, b in zip(whole, alone, strict=True)
            )
    except Exception:  # functions that raise here have no known rule
        return False


def traced(where: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> jax.stages.Traced:
    """Trace the function that a user gave to `where`, once per types; reject side effects."""
    if not callable(fn):
        raise TypeError(f"{where}: expected a function; got {type(fn).__name__}")
    try:
        program = jax.jit(fn).trace(*args, **kwargs)
    except jax.errors.JAXTypeError as error:
        raise TypeError(
            f"{where}: expected a function that JAX can trace; got one that needs the values of "
            f"its arguments ({str(error).splitlines()[0]}). Use jax.lax.cond or jnp.where."
        ) from error
    if effects := sorted({type(effect).__name__ for effect in program.jaxpr.effects}):
        raise ValueError(
            f"{where}: expected a function without side effects; got {', '.join(effects)}. Remove "
            "jax.debug.print, callbacks and Refs."
        )
    return program


def simulate(
    fn: Callable[..., Any], example: Sequence[Any], *, seeds: int = 32, name: str = "simulate"
) -> Simulation:
    """Estimate the ideal factors of a function by simulation.

    Scaling:
        The forward factor is `1 / std(fn(x))`, and that of each floating argument `1 / RMS` of its
        gradient, over all elements and draws, with arguments and cotangent drawn from N(0, 1). A
        scalar result is a loss: factor and cotangent are 1, so the gradient includes the 1 / N of a
        mean. Intervals are Student's t intervals of the mean squares of the draws.

    Args:
        fn: Differentiable function of arrays that returns one floating array.
        example: Example arguments. Floating ones are replaced by random arrays of the same shape.
        seeds: Number of random draws, at least 2.
        name: Name of the caller, for messages.

    Raises:
        TypeError: If JAX cannot trace `fn`, or the result is not one floating array.
        ValueError: If no argument is floating, or the result or a gradient is constant.

    Example:
        >>> found = simulate(jnp.matmul, [np.zeros((64, 16)), np.zeros((16, 64))])
        >>> bool(abs(found.factors.fwd - 0.25) < 0.01)
        True

    References:
        Unit Scaling, arXiv 2303.11257, empirical factors.
    """
    where = f"unitscale.{name}"
    if seeds < 2:
        raise ValueError(f"{where}: seeds must be at least 2, for an interval; got {seeds}")
    if hasattr(example, "dtype"):
        raise TypeError(
            f"{where}: expected a sequence of example arguments; got one array. Put it in a list."
        )
    example = [jnp.asarray(x) if isinstance(x, float | int) else x for x in example]
    floats = [i for i, x in enumerate(example) if is_floating(x)]
    if not floats:
        raise ValueError(
            f"{where}: expected a floating argument; got {len(example)} arguments, none floating"
        )

    def of_floats(*xs: jax.Array) -> Any:
        given = dict(zip(floats, xs, strict=True))
        return fn(*(given.get(i, x) for i, x in enumerate(example)))

    shapes = [jax.ShapeDtypeStruct(np.shape(example[i]), np.float32) for i in floats]
    out = traced(where, of_floats if callable(fn) else fn, *shapes).out_info
    if is_scaled(out) or not is_floating(out):
        raise TypeError(f"{where}: expected a function that returns one floating array; got {out}")
    is_loss = out.shape == ()

    def draw(key: jax.Array) -> jax.Array:
        *keys, last = jax.random.split(key, len(floats) + 1)
        xs = [jax.random.normal(k, s.shape) for k, s in zip(keys, shapes, strict=True)]
        y, vjp = jax.vjp(of_floats, *xs)
        cotangent = jnp.ones(()) if is_loss else jax.random.normal(last, out.shape)
        grads = vjp(cotangent.astype(out.dtype))
        wide = [x.astype(jnp.float32) for x in (y, *grads)]
        return jnp.stack([jnp.mean(wide[0]), *(jnp.mean(jnp.square(x)) for x in wide)])

    with compile_time():
        keys = jax.random.split(jax.random.key(0), seeds)
        draws = jax.jit(lambda k: jax.lax.map(draw, k))(keys)
    means, squares, *gradients = np.asarray(draws, np.float64).T
    mean = means.mean()
    variances = squares - 2 * mean * means + mean**2
    fwd, fwd_interval = 1.0, (1.0, 1.0)
    if not is_loss:
        fwd, fwd_interval = _factor(where, "its result", variances, float(np.mean(squares)))
    names = (f"the gradient of argument {i}" for i in floats)
    both = [_factor(where, *x, 0.0) for x in zip(names, gradients, strict=True)]
    bwd, bwd_intervals = zip(*both, strict=True)
    return Simulation(Factors(fwd, bwd), fwd_interval, bwd_intervals, is_loss)


def _factor(
    where: str, what: str, squares: np.ndarray, noise: float
) -> tuple[float, tuple[float, float]]:
    """Return 1 over the root of the mean of `squares`, and its confidence interval."""
    mean = float(squares.mean())
    if not math.isfinite(mean):
        raise ValueError(
            f"{where}: {what} is not finite for unit normal inputs. Restrict the function's domain."
        )
    if mean <= 8 * float(np.finfo(np.float32).eps) ** 2 * noise or mean == 0:
        raise ValueError(
            f"{where}: {what} is constant for unit normal inputs, so no factor gives it RMS 1"
        )
    freedom = squares.size - 1
    quantile = _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * freedom)
    half = quantile * float(squares.std(ddof=1)) / math.sqrt(squares.size)
    most = max(mean - half, mean * 1e-6)
    return 1 / math.sqrt(mean), (1 / math.sqrt(mean + half), 1 / math.sqrt(most))

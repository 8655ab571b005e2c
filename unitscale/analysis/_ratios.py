"""The factor between an op's own backward pass and its true derivative, operand by operand."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from ._exact import evaluate, is_cast, types_of
from ._graph import is_float


class Ratio(NamedTuple):
    """How one gradient compares with another.

    Attributes:
        constant: the multiple of the true one nearest to the given one; nan if one of them is zero
            or not finite.
        spread: share of the given one that is no multiple of it; nan if one is not finite.
        given: norm of the given gradient.
        true: norm of the true gradient.

    Example:
        >>> print(f"{Ratio.of(np.array([2.0, 4.0]), np.array([1.0, 2.0])).constant:.6}")
        2.0
    """

    constant: float
    spread: float
    given: float
    true: float

    @classmethod
    def of(cls, given: Any, true: Any) -> "Ratio":
        """Compares two arrays."""
        given, true = np.asarray(given, np.float64), np.asarray(true, np.float64)
        g, t = float(np.linalg.norm(given)), float(np.linalg.norm(true))
        if not (math.isfinite(g) and math.isfinite(t)):
            return cls(float("nan"), float("nan"), g, t)
        if not (g and t):
            return cls(float("nan"), 1.0 if g != t else 0.0, g, t)
        constant = float(np.vdot(given / t, true / t))
        return cls(constant, float(np.linalg.norm(given - constant * true) / g), g, t)


def local_ratios(
    closed: ClosedJaxpr, args: list[Any], run: Callable[..., Any]
) -> dict[tuple[int, ...], list[Ratio | None]]:
    """Measures each custom_vjp function of a program at the values it has there.

    Args:
        closed: the program.
        args: its flat arguments.
        run: compiles and calls a function of the arguments.

    Returns:
        By the path of the call, one ratio per operand; None for one without gradient.

    Example:
        >>> from unitscale import ops
        >>> closed = jax.make_jaxpr(lambda x: ops.scale(x, 2.0, 3.0))(1.0)
        >>> with jax.enable_x64(True):
        ...     found = local_ratios(closed, [1.0], lambda f, *xs: f(*xs))
        >>> found[0,][0].constant
        1.5
    """

    def program(*xs: Any) -> Any:
        found: dict[tuple[int, ...], Any] = {}
        evaluate(
            closed,
            *xs,
            watch=lambda path, eqn, operands: found.update({path: _gradients(eqn, operands)}),
        )
        return found

    pairs = run(program, *args)
    return {
        path: [None if pair is None else Ratio.of(*pair) for pair in operands]
        for path, operands in pairs.items()
    }


def _gradients(eqn: Any, operands: list[Any]) -> list[Any]:
    avals = types_of([atom.aval for atom in eqn.invars])
    results = types_of([var.aval for var in eqn.outvars])
    floats = [i for i, aval in enumerate(avals) if is_float(aval)]
    kept = [i for i, aval in enumerate(results) if is_float(aval)]

    def own(*xs: Any) -> Any:
        values, cotangents = xs[: len(avals)], xs[len(avals) :]

        def function(*chosen: Any) -> list[Any]:
            full = list(values)
            for i, x in zip(floats, chosen, strict=True):
                full[i] = x
            ys = eqn.primitive.bind(*full, **eqn.primitive.get_bind_params(eqn.params))
            return [ys[i] for i in kept]

        return jax.vjp(function, *(values[i] for i in floats))[1](list(cotangents))

    closed = jax.make_jaxpr(own)(*avals, *(results[i] for i in kept))
    keys = jax.random.split(jax.random.key(0), len(kept))
    cotangents = [
        jax.random.normal(key, results[i].shape, jnp.float64)
        for key, i in zip(keys, kept, strict=True)
    ]
    given = evaluate(closed, *operands, *cotangents)

    def body(*chosen: Any) -> list[Any]:
        full = list(operands)
        for i, x in zip(floats, chosen, strict=True):
            full[i] = x
        ys = evaluate(eqn.params["call_jaxpr"], *full)
        return [ys[i] for i in kept]

    true = jax.vjp(body, *(operands[i] for i in floats))[1](cotangents)
    by_operand: list[Any] = [None] * len(avals)
    for i, g, t in zip(floats, given, true, strict=True):
        by_operand[i] = None if is_cast(eqn) else (g, t)
    return by_operand

"""Evaluate programs in float64 without rounding, so that gradients compare to many digits."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from ..core import cast, dithered
from ._program import Interpreter, bind, inner_program, is_float, types_of


def wide(x: Any) -> Any:
    """Return a floating array in float64, and any other value as it is."""
    return lax.convert_element_type(x, jnp.float64) if is_float(x) else x


def evaluate(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluate a program in float64 without rounding; call it under `jax.enable_x64(True)`.

    Casts and rounding are identities. Functions with a custom_vjp are replaced by their forward
    bodies, so that the derivative of the result is the true one; custom_jvp rules are kept.
    """
    arrays = [jnp.asarray(x) if isinstance(x, float | int) else x for x in args]
    return Exact().run(closed, [wide(x) for x in arrays])


def has_while(jaxpr: Any) -> bool:
    """Return whether a program has a while loop, also inside of another."""
    inner = (p.jaxpr for e in jaxpr.eqns for p in e.params.values() if isinstance(p, ClosedJaxpr))
    return any(e.primitive.name == "while" for e in jaxpr.eqns) or any(map(has_while, inner))


@functools.cache
def _names_of_rounding() -> set[str]:
    """Names of the functions in jaxprs that do nothing but round."""
    eqns = jax.make_jaxpr(lambda x: dithered(cast(x, "E4M3"), 2))(1.0).eqns
    return {p.jaxpr.debug_info.func_name for eqn in eqns if (p := inner_program(eqn)) is not None}


def only_rounds(eqn: Any) -> bool:
    """Return whether an equation is `cast` or `dithered`, and not a derivative of it."""
    inner = inner_program(eqn)
    if inner is None or inner.jaxpr.debug_info.func_name not in _names_of_rounding():
        return False
    x, *results = eqn.invars[0], *eqn.outvars
    return len(results) == 1 and all(
        is_float(v.aval) and v.aval.shape == x.aval.shape for v in (x, *results)
    )


class Exact(Interpreter):
    """Evaluates programs in float64."""

    def constant(self, x: Any, aval: Any) -> Any:
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        return np.asarray(x, np.float64 if is_float(aval) else aval.dtype)

    def apply(self, eqn: Any, operands: list[Any]) -> list[Any]:
        name, inner = eqn.primitive.name, inner_program(eqn)
        floats = all(is_float(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
        if name == "reduce_precision" or (name == "convert_element_type" and floats):
            return operands
        if only_rounds(eqn):
            return operands[:1]
        if name in ("scan", "while", "cond"):
            return self.control(eqn, operands)[0]
        if name == "custom_jvp_call":
            return _custom_jvp(eqn, operands)
        if name == "reduce":
            return self._reduce(eqn, operands)
        if name == "shard_map":
            raise ValueError(
                "unitscale.analysis: expected a program on one device; got one with shard_map, "
                "whose collectives have no meaning there. Analyse the function inside of it."
            )
        if inner is not None:
            return self.run(inner, operands)
        if name.startswith("scatter"):  # the equation holds an addition of its own type
            names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            scatter = getattr(lax, name.replace("-", "_"))
            return [scatter(*operands, **{n: eqn.params[n] for n in names})]
        return [wide(r) for r in _bind_wide(eqn, operands)]

    def _reduce(self, eqn: Any, operands: list[Any]) -> list[Any]:
        """Join one element after the other, which has a derivative."""
        half, dims = len(operands) // 2, eqn.params["dimensions"]
        join = jnp.vectorize(lambda *both: tuple(self.run(eqn.params["jaxpr"], both)))
        moved = [jnp.moveaxis(x, dims, range(len(dims))) for x in operands[:half]]
        rows = [x.reshape(-1, *x.shape[len(dims) :]) for x in moved]
        start = [
            jnp.broadcast_to(s, x.shape[1:]) for s, x in zip(operands[half:], rows, strict=True)
        ]
        return lax.scan(lambda carry, row: (list(join(*carry, *row)), None), start, rows)[0]


def _bind_wide(eqn: Any, operands: list[Any]) -> list[Any]:
    """Apply a primitive in float64, or in its own types where it must see their bits."""

    def widened(value: Any) -> Any:
        try:
            is_type = isinstance(value, np.dtype | type) and jnp.issubdtype(value, jnp.floating)
        except TypeError:
            return value
        return np.dtype(np.float64) if is_type else value

    if eqn.primitive.name != "bitcast_convert_type":
        params = {name: widened(value) for name, value in eqn.params.items()}
        if "precision" in params:
            params["precision"] = None  # it may ask for operands to be rounded
        try:
            return bind(eqn, operands, params)
        except (TypeError, ValueError, NotImplementedError):
            pass  # the operation has no float64 form
    stored = [
        lax.convert_element_type(x, atom.aval.dtype) if is_float(atom.aval) else x
        for x, atom in zip(operands, eqn.invars, strict=True)
    ]
    return bind(eqn, stored, eqn.params)


def _custom_jvp(eqn: Any, operands: list[Any]) -> list[Any]:
    """Evaluate a function with its own rule, such as that of relu at zero."""
    closed, avals = eqn.params["call_jaxpr"], types_of(eqn.invars)
    _, rule = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
    float0 = jax.dtypes.float0  # the type of tangents of integers
    tangents = [a if is_float(a) else jax.ShapeDtypeStruct(a.shape, float0) for a in avals]
    try:
        with_tangents = jax.make_jaxpr(rule.call_wrapped)(*avals, *tangents)
    except TypeError:  # FP8 matmuls reject second derivatives; here nothing is rounded
        return Exact().run(closed, operands)
    function = jax.custom_jvp(lambda *xs: Exact().run(closed, xs))

    @function.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        found = evaluate(with_tangents, *primals, *tangents)
        return found[: len(eqn.outvars)], found[len(eqn.outvars) :]

    return function(*operands)

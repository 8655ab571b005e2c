"""Find the matmuls and conversions in jaxprs."""

from collections.abc import Iterator
from typing import Any

import jax

PRODUCTS = "dot_general", "conv_general_dilated"
CONVERSIONS = "convert_element_type", "bitcast_convert_type"


def products(jaxpr: Any) -> list[tuple[str, ...]]:
    """List the primitive and operand dtypes of every matmul in a jaxpr."""
    return [
        (eqn.primitive.name, *(x.aval.dtype.name for x in eqn.invars))
        for eqn in equations(jaxpr)
        if eqn.primitive.name in PRODUCTS
    ]


def conversions(jaxpr: Any, dtype: str) -> list[tuple[int, ...]]:
    """List the shapes of all arrays in a jaxpr that are converted to a dtype."""
    return [
        eqn.outvars[0].aval.shape
        for eqn in equations(jaxpr)
        if eqn.primitive.name in CONVERSIONS and eqn.outvars[0].aval.dtype == dtype
    ]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr as lowered for this platform, inner ones first."""
    for eqn in jaxpr.eqns:
        params = eqn.params
        if platforms := params.get("branches_platforms"):
            own = jax.default_backend()
            index = next(i for i, names in enumerate(platforms) if names is None or own in names)
            params = {"branch": params["branches"][index]}
        for inner in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                yield from equations(inner)
        yield eqn


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")

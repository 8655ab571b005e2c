"""What programs multiply, and what they convert."""

from collections.abc import Iterator
from typing import Any

import jax

PRODUCTS = "dot_general", "conv_general_dilated"
CONVERSIONS = "convert_element_type", "bitcast_convert_type"


def products(jaxpr: Any) -> list[tuple[str, ...]]:
    """Primitive and operand types of every product of a jaxpr."""
    return [
        (eqn.primitive.name, *(x.aval.dtype.name for x in eqn.invars))
        for eqn in equations(jaxpr)
        if eqn.primitive.name in PRODUCTS
    ]


def conversions(jaxpr: Any, dtype: str) -> list[tuple[int, ...]]:
    """The shape of every array of a jaxpr that is converted to a dtype."""
    return [
        eqn.outvars[0].aval.shape
        for eqn in equations(jaxpr)
        if eqn.primitive.name in CONVERSIONS and eqn.outvars[0].aval.dtype == dtype
    ]


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr, after inner ones; of what differs by platform, this machine's."""
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

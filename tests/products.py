"""What programs multiply."""

from typing import Any

import jax

PRODUCTS = "dot_general", "conv_general_dilated"


def products(jaxpr: Any) -> list[tuple[str, ...]]:
    """Primitive and operand types of every product of a jaxpr, inner ones included.

    Of what differs between platforms, this machine's counts.
    """
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in PRODUCTS:
            found.append((eqn.primitive.name, *(x.aval.dtype.name for x in eqn.invars)))
        params = eqn.params
        if platforms := params.get("branches_platforms"):
            own = jax.default_backend()
            index = next(i for i, names in enumerate(platforms) if names is None or own in names)
            params = {"branch": params["branches"][index]}
        for inner in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                found += products(inner)
    return found


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns")

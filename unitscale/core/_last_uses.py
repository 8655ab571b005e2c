"""When an interpreter of a jaxpr may let a value go."""

from __future__ import annotations

from typing import Any

from jax.extend.core import Jaxpr, Literal


def last_uses(jaxpr: Jaxpr) -> dict[int, list[Any]]:
    """For every equation, the variables that nothing after it reads.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(0.0).jaxpr
        >>> last_uses(jaxpr)[0] == jaxpr.invars
        True
    """
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        for atom in [*eqn.invars, *eqn.outvars]:
            if not isinstance(atom, Literal):
                last[atom] = index
    for atom in jaxpr.outvars:
        if not isinstance(atom, Literal):
            last.pop(atom, None)
    groups: dict[int, list[Any]] = {}
    for var, index in last.items():
        groups.setdefault(index, []).append(var)
    return groups

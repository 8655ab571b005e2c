"""How each array of an optimizer's state is stored, by what the state of a transformation holds."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from ..core import format_of, is_scaled
from ._moments import Moment, stack_axes_of, store
from ._states import Role, held_by
from ._values import is_floating

Moments: TypeAlias = tuple[Any, Any] | Callable[[str, Role | None], Any]
"""Formats of the moments: see `unitscale.optim.scaled`."""

# Below this many binades between its largest and smallest value, a format cannot hold squares.
_BINADES_OF_SQUARES = 34


def path_name(path: Any) -> str:
    """The name of a leaf: ``0.mu.kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def map_with_role(
    f: Callable[[Any, Any, Role | None], Any], state: Any, path: Any = (), role: Role | None = None
) -> Any:
    """Maps ``f(path, leaf, role)`` over a state; the role is that of the nearest known field."""

    def is_known(x: Any) -> bool:
        return role is None and held_by(x) is not None

    def visit(own: Any, x: Any) -> Any:
        fields = held_by(x) if role is None else None
        if fields is None:
            return f((*path, *own), x, role)
        return x._replace(
            **{
                name: map_with_role(
                    f, value, (*path, *own, jax.tree_util.GetAttrKey(name)), fields.get(name)
                )
                for name, value in zip(x._fields, x, strict=True)
            }
        )

    return jax.tree_util.tree_map_with_path(visit, state, is_leaf=is_known)


def as_moment(moment: Any, role: Role | None, where: str, block: int | None) -> Moment:
    """Returns a format as a Moment, second moments with their root; rejects one without range."""
    if not isinstance(moment, Moment):
        moment = Moment(moment, root=role == "second", block=block)
    fmt = format_of(moment.dtype)
    if role == "second" and not moment.root:
        ratio = fmt.max / fmt.smallest_subnormal
        if ratio < 2.0**_BINADES_OF_SQUARES:
            raise ValueError(
                f"unitscale.optim.scaled: moments of {where} must hold squares; got {fmt.name} "
                f"without the root, whose largest and smallest value are a factor {ratio:.1e} "
                f"apart. Use Moment({fmt.name!r}, root=True) or 16 bits."
            )
    return moment


def formats_of(moments: Any, block: int | None) -> Callable[[str, Role | None], Any]:
    """The format of each array of a state, as a function of its path and role.

    Raises:
        TypeError, ValueError: if formats of moments are not as `scaled` takes them.
    """
    if callable(moments):
        return moments
    if not isinstance(moments, tuple) or len(moments) != 2:
        raise TypeError(
            "unitscale.optim.scaled: moments must be (first, second), two formats, or a function "
            f"of path and role; got {moments!r}"
        )
    first, second = (
        None if moment is None else as_moment(moment, role, f"the {role} moment", block)
        for moment, role in zip(moments, ("first", "second"), strict=True)
    )
    table = {"first": first, "second": second, "trace": _finer(first, second), None: None}
    return lambda path, role: table[role]


def _finer(first: Moment | None, second: Moment | None) -> Moment | None:
    """The format of a momentum that is the step itself: no root divides its errors away."""
    if first is None or second is None:
        return None
    moment = min(first, second, key=lambda moment: format_of(moment.dtype).eps)
    return dataclasses.replace(moment, root=False)


def store_state(state: Any, params: Any, moments: Moments, block: int | None, min_size: int) -> Any:
    """Returns fresh state with its moments stored in their formats, rounded to nearest.

    One of fewer entries than ``min_size`` stays as it is, and so does a number: it has no blocks
    and saves no bytes. A moment has one scale per item of the axes of which its parameter has.
    """
    formats = formats_of(moments, block)
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_scaled)
    stacks = {(path, jnp.shape(leaf)): stack_axes_of(leaf) for path, leaf in leaves}

    def convert(path: Any, leaf: Any, role: Role | None) -> Any:
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (int, float, complex)):
            raise TypeError(
                "unitscale.optim.scaled: the state of inner must be a tree of arrays; got "
                f"{type(leaf).__name__} at {path_name(path)}. Register its type as a JAX pytree."
            )
        if not is_floating(leaf) or jnp.size(leaf) < max(2, min_size):
            return leaf
        moment = formats(path_name(path), role)
        if moment is None:
            return leaf
        moment = as_moment(moment, role, path_name(path), block)
        own = [stacks.get((path[start:], jnp.shape(leaf)), 0) for start in range(len(path) + 1)]
        moment = dataclasses.replace(moment, stack_axes=max(own, default=0))
        return store(jnp.asarray(leaf), moment, "nearest", None)

    return map_with_role(convert, state)

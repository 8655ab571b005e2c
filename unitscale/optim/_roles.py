"""Which arrays of an optimizer's state are moments, and how each is stored."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from ..core import format_of, is_scaled
from ._moments import Moment, store

Role: TypeAlias = Literal["first", "second"]
"""What an array of state is: a mean of gradients, or of their squares. See `scaled`."""

Moments: TypeAlias = tuple[Any, Any] | Callable[[str, Role | None], Any]
"""Formats of the moments: see `unitscale.optim.scaled`."""

# By the field that holds them, in optax and elsewhere. What is not named here stays as it is:
# iterates, sums that only grow, gradients that are being accumulated.
_FIRST = ("mu", "m", "m1", "trace", "ema", "momentum", "exp_avg", "first")
_SECOND = (
    "nu",
    "v",
    "n",
    "nu_max",
    "exp_avg_sq",
    "sum_of_squares",
    "grad_sum_sq",
    "e_g",
    "e_x",
    "second",
)

# Below this many binades between its largest and smallest value, a format cannot hold squares.
_BINADES_OF_SQUARES = 34


def path_name(path: Any) -> str:
    """The name of a leaf: ``0.mu.kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _name(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))))


def role_of(path: Any, leaf: Any, shapes: dict[Any, tuple[int, ...]]) -> Role | None:
    """What a leaf of the state is, by its path, given paths and shapes of the parameters.

    A moment has the shape of a parameter and lies at that parameter's path below a field whose name
    says what it is: ``ScaleByAdamState(mu=params-like, nu=params-like)``.
    """
    for start in range(1, len(path) + 1):
        if shapes.get(path[start:]) == leaf.shape:
            name = _name(path[start - 1])
            return "first" if name in _FIRST else "second" if name in _SECOND else None
    return None


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


def check_moments(moments: Any, block: int | None) -> None:
    """Raises if formats of moments are not as `scaled` takes them."""
    if callable(moments):
        return
    if not isinstance(moments, tuple) or len(moments) != 2:
        raise TypeError(
            "unitscale.optim.scaled: moments must be (first, second), two formats, or a function "
            f"of path and role; got {moments!r}"
        )
    for moment, role in zip(moments, ("first", "second"), strict=True):
        if moment is not None:
            as_moment(moment, role, f"the {role} moment", block)


def store_state(state: Any, params: Any, moments: Moments, block: int | None) -> Any:
    """Returns fresh state with its moments stored in their formats, rounded to nearest."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_scaled)
    shapes = {path: jnp.shape(leaf) for path, leaf in leaves}

    def convert(path: Any, leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (int, float, complex)):
            raise TypeError(
                "unitscale.optim.scaled: the state of inner must be a tree of arrays; got "
                f"{type(leaf).__name__} at {path_name(path)}. Register its type as a JAX pytree."
            )
        # A number in an array has no blocks and saves no bytes.
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating) or jnp.size(leaf) <= 1:
            return leaf
        role = role_of(path, leaf, shapes)
        if callable(moments):
            moment = moments(path_name(path), role)
        else:
            moment = {"first": moments[0], "second": moments[1], None: None}[role]
        if moment is None:
            return leaf
        return store(
            jnp.asarray(leaf), as_moment(moment, role, path_name(path), block), "nearest", None
        )

    return jax.tree_util.tree_map_with_path(convert, state)

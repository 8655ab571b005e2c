"""Which arrays in optax states are moments, and the formats that store them."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from ..core import format_of, is_scaled
from ._storage import Moment, is_floating, stack_axes_of, store

Role: TypeAlias = Literal["first", "second", "trace"]
"""Role of an array in optax's state, for `scaled`: "first", Adam's mean of gradients; "second", a
mean of squares; "trace", momentum that is not divided by a second moment (SGD, Lion)."""

Moments: TypeAlias = tuple[Any, Any] | Callable[[str, Role | None], Any]
"""Formats of the moments: see `unitscale.optim.scaled`."""

# Keyed by type of state, because names of fields are ambiguous: `nu` is a mean of squares in Adam,
# and momentum in SM3. Fields that are not listed are stored as they are, because rounding would
# break them: sums that only grow (Adagrad, MADGRAD, COCOB, DoG, `grad_sum` of Prodigy and
# D-Adaptation), averages and copies of parameters, gradients that are subtracted later (`g` of
# Adan, L-BFGS), means whose square is subtracted from a mean of squares (centered RMSprop,
# AdaBelief), means that change too slowly (`m2` of AdEMAMix), cumulative factors (Rprop).
_ROLES: dict[str, dict[str, Role]] = {
    "FactoredState": {"v": "second"},
    "ScaleByAdaDeltaState": {"e_g": "second", "e_x": "second"},
    "ScaleByAdamState": {"mu": "first", "nu": "second"},
    "ScaleByAdanState": {"m": "trace", "v": "trace", "n": "second"},
    "ScaleByAdemamixState": {"m1": "first", "nu": "second"},
    "ScaleByAmsgradState": {"mu": "first", "nu": "second", "nu_max": "second"},
    "ScaleByBeliefState": {"nu": "second"},
    "ScaleByLionState": {"mu": "trace"},
    "ScaleByNovogradState": {"mu": "trace"},
    "ScaleByRmsState": {"nu": "second"},
    "ScaleByRmsWithCountState": {"nu": "second"},
    "ScaleBySM3State": {"nu": "trace"},
    "ScaleBySimplifiedAdEMAMixState": {"m": "trace", "n": "second"},
    "TraceState": {"trace": "trace"},
    "DAdaptAdamWState": {"exp_avg": "first", "exp_avg_sq": "second"},
    "MomoAdamState": {"exp_avg": "trace", "exp_avg_sq": "second"},
    "MomoState": {"exp_avg": "trace"},
    "MuonState": {"mu": "trace"},
    "ProdigyState": {"exp_avg": "first", "exp_avg_sq": "second"},
    "SophiaState": {"mu": "trace", "nu": "trace"},
}

# Transformations that measure how far the weights move, with first steps near 1e-6 of the weights.
_TINY_STEPS = {"DAdaptAdamWState", "DoGState", "DoWGState", "MechanicState", "ProdigyState"}
_TINY_STEPS |= {"ScaleByDistanceOverGradientsState"}

# Formats of squares must have this ratio between their largest and smallest numbers.
_RANGE_OF_SQUARES = 2.0**34


def _optax_name(x: Any) -> str:
    """Return the name of an optax state's type; "" for anything else."""
    return type(x).__name__ if type(x).__module__.partition(".")[0] == "optax" else ""


def check_first_steps(state: Any, weights: Any) -> None:
    """Raise an error if rounded weights would lose the first steps of a transformation."""
    if weights is None or format_of(weights).eps <= format_of(jnp.float32).eps:
        return
    leaves = jax.tree.leaves(state, is_leaf=lambda x: _optax_name(x) in _TINY_STEPS)
    if tiny := [name for x in leaves if (name := _optax_name(x))]:
        raise ValueError(
            f"unitscale.optim.scaled: inner keeps a {tiny[0]}: its first steps are near 1e-6 of "
            f"the weights; weights in {format_of(weights).name} lose them. Pass weights=None."
        )


def path_name(path: Any) -> str:
    """Return the dotted path of a leaf, such as ``0.mu.kernel``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _roles_of(state: Any) -> dict[Any, Role | None]:
    """Return the roles of the arrays of a state, by path."""

    def is_known(x: Any) -> bool:
        return _optax_name(x) in _ROLES

    return {
        (*path, *own): _ROLES[_optax_name(x)].get(own[0].name)
        for path, x in jax.tree.leaves_with_path(state, is_leaf=is_known)
        if is_known(x)
        for own, _ in jax.tree.leaves_with_path(x)
    }


def _as_moment(moment: Any, role: Role | None, where: str, block: int | None) -> Moment:
    """Return the Moment of a format; by default second moments are stored as square roots."""
    if not isinstance(moment, Moment):
        moment = Moment(moment, root=role == "second", block=block)
    fmt = format_of(moment.dtype)
    ratio = fmt.max / fmt.smallest_subnormal
    if role == "second" and not moment.root and ratio < _RANGE_OF_SQUARES:
        raise ValueError(
            f"unitscale.optim.scaled: moments of {where} must hold squares; got {fmt.name}, with "
            f"a range of {ratio:.1e}. Use Moment({fmt.name!r}, root=True) or 16 bits."
        )
    return moment


def formats_of(moments: Any, block: int | None) -> Callable[[str, Role | None], Any]:
    """Return a function from path and role of an array of state to its format."""
    if callable(moments):
        return moments
    if not isinstance(moments, tuple) or len(moments) != 2:
        raise TypeError(
            "unitscale.optim.scaled: moments must be (first, second), two formats, or a function "
            f"of path and role; got {moments!r}"
        )
    first, second = (
        None if moment is None else _as_moment(moment, role, f"the {role} moment", block)
        for moment, role in zip(moments, ("first", "second"), strict=True)
    )
    trace = None
    if first is not None and second is not None:
        # Errors of momentum go into the update undivided, so it gets the more precise format.
        trace = min(first, second, key=lambda moment: format_of(moment.dtype).eps)
        trace = dataclasses.replace(trace, root=False)
    table = {"first": first, "second": second, "trace": trace, None: None}
    return lambda path, role: table[role]


def store_state(state: Any, params: Any, moments: Moments, block: int | None, min_size: int) -> Any:
    """Store the moments of a fresh state in their formats, with their parameters' stack axes."""
    formats, roles = formats_of(moments, block), _roles_of(state)
    leaves = jax.tree.leaves_with_path(params, is_leaf=is_scaled)
    # -1 for parameters that `scale_params` left in float32.
    some = any(is_scaled(leaf) for _, leaf in leaves)
    stacks = {
        (path, jnp.shape(leaf)): stack_axes_of(leaf) if is_scaled(leaf) or not some else -1
        for path, leaf in leaves
    }

    def convert(path: Any, leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (int, float, complex)):
            raise TypeError(
                "unitscale.optim.scaled: the state of inner must be a tree of arrays; got "
                f"{type(leaf).__name__} at {path_name(path)}. Register its type as a JAX pytree."
            )
        if not is_floating(leaf) or jnp.size(leaf) < max(2, min_size):
            return leaf
        own = [stacks.get((path[start:], jnp.shape(leaf)), 0) for start in range(len(path) + 1)]
        name, role = path_name(path), roles.get(path)
        moment = formats(name, role)
        if moment is None or -1 in own:
            return leaf
        moment = _as_moment(moment, role, name, block)
        return store(dataclasses.replace(moment, stack_axes=max(own)), jnp.asarray(leaf))

    return jax.tree.map_with_path(convert, state)

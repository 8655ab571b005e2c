"""Optimizer state from one set of formats to another."""

from typing import Any

import jax
import jax.numpy as jnp

from ._moments import is_stored, load, moment_of, store
from ._scaled import ScaledState


def _is_own(x: Any) -> bool:
    return isinstance(x, ScaledState) or is_stored(x)


def _values(state: Any) -> Any:
    """The state of the inner transformation, its moments as float32 arrays."""

    def value(x: Any) -> Any:
        return _values(x.inner) if isinstance(x, ScaledState) else load(x)

    return jax.tree.map(value, state, is_leaf=_is_own)


def _keys(state: Any) -> list[Any]:
    found = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, ScaledState))
    return [x.key for x in found if isinstance(x, ScaledState)]


def convert_state(state: Any, like: Any) -> Any:
    """Brings optimizer state into other formats, so that a run goes on in them.

    Scaling:
        Each moment is read as float32 and rounded once, to nearest, into the format that ``like``
        has in its place, with a fresh scale. What has no format of its own is kept as it is.

    Args:
        state: of any optax transformation, or of `scaled` around it.
        like: fresh state of the same transformation in the formats wanted: that of
            ``scaled(inner, ...).init(params)``, or of ``inner.init(params)`` for float32.

    Returns:
        A tree like ``like`` with the numbers of ``state``. Keys for stochastic rounding are those
        of ``state`` where it has them.

    Raises:
        ValueError: if the two are not of the same transformation and parameters.

    Example:
        >>> import optax
        >>> from unitscale.optim import scaled
        >>> plain, params = optax.adam(1e-3), {"w": jnp.ones((64, 64))}
        >>> state = plain.init(params)
        >>> _, state = plain.update(params, state, params)
        >>> ours = scaled(plain)
        >>> params = ours.scale_params(params)
        >>> convert_state(state, ours.init(params)).inner[0].mu["w"]
        ScaledArray(float8_e4m3fn[64,64], scale=0.000488281)

    References:
        Peng et al., "FP8-LM: Training FP8 Large Language Models", 2023, arXiv 2310.18313,
        section 2.2.
    """

    def convert(new: Any, value: Any) -> Any:
        if isinstance(new, ScaledState):
            key = next(keys, None)
            return ScaledState(
                jax.tree.map(convert, new.inner, value, is_leaf=_is_own),
                new.key if key is None or new.key is None else key,
            )
        if jnp.shape(new) != jnp.shape(value):
            raise ValueError(f"got shape {jnp.shape(value)}, expected {jnp.shape(new)}")
        if is_stored(new):
            return store(value, moment_of(new), "nearest", None)
        dtype = getattr(new, "dtype", None)
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
            return jnp.asarray(value, dtype)
        return value

    keys = iter(_keys(state))
    try:
        return jax.tree.map(convert, like, _values(state), is_leaf=_is_own)
    except ValueError as error:
        raise ValueError(
            "unitscale.optim.convert_state: state must be of the transformation and the parameters "
            f"that like is of: {error}"
        ) from error

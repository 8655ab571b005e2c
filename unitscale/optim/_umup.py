"""u-muP: one learning rate for every width and depth."""

from typing import Any

import jax
import optax

from .. import rules


def _has_role(x: Any) -> bool:
    return hasattr(x, "role") and hasattr(x, "fan_in")


def _factor(parameter: Any) -> float:
    if not _has_role(parameter):
        raise ValueError(
            "unitscale.optim.umup: params must be variables with role, fan_in, fan_out and depth, "
            "as those of unitscale.nn layers (nnx.state(model, nnx.Param)); got "
            f"{type(parameter).__name__} without a role"
        )
    return rules.umup_learning_rate(
        parameter.role, fan_in=parameter.fan_in, fan_out=parameter.fan_out, depth=parameter.depth
    )


def umup(inner: optax.GradientTransformation, params: Any) -> optax.GradientTransformationExtraArgs:
    """Gives every parameter its u-muP learning rate.

    Scaling:
        The updates of ``inner`` are multiplied by `rules.umup_learning_rate` of each parameter's
        role, fan-in, fan-out and depth. So would be a weight decay inside ``inner``: keep it
        outside, where it depends on neither learning rate nor schedule, by
        ``optax.chain(umup(optax.adam(schedule), params), optax.add_decayed_weights(-decay))``.

    Args:
        inner: an Adam-like optax transformation, whose updates are of unit size times the
            learning rate.
        params: the parameters that will be trained, as variables that carry metadata:
            ``nnx.state(model, nnx.Param)``.

    Returns:
        optax.GradientTransformation over trees of the same structure, of variables or of arrays.

    Raises:
        ValueError: if a parameter has no role or an unknown one; in ``update``, if the tree of
            updates differs from ``params``.

    Example:
        >>> from flax import nnx
        >>> from unitscale import nn
        >>> params = nnx.state(nn.Dense(64, 8, rngs=nnx.Rngs(0)), nnx.Param)
        >>> tx = umup(optax.adam(1.0), params)
        >>> updates, _ = tx.update(params, tx.init(params), params)
        >>> print(abs(updates["kernel"][...]).max().round(4))
        0.125

    References:
        Blake et al., "u-muP", 2024, arXiv 2407.17465, table 2.
    """
    inner = optax.with_extra_args_support(inner)
    variables, treedef = jax.tree.flatten(params, is_leaf=_has_role)
    factors = [_factor(variable) for variable in variables]

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        updates, state = inner.update(updates, state, params, **extra_args)
        leaves, structure = jax.tree.flatten(updates, is_leaf=_has_role)
        if structure != treedef:
            raise ValueError(
                "unitscale.optim.umup: updates must have the structure of the params given to "
                f"umup; got {structure}, expected {treedef}"
            )
        scaled = [
            jax.tree.map(lambda u, factor=factor: u * factor, leaf)
            for factor, leaf in zip(factors, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, scaled), state

    return optax.GradientTransformationExtraArgs(inner.init, update)

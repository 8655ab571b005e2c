"""u-muP: one learning rate for every width and depth."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import optax

from .. import rules
from ._roles import path_name


def has_role(x: Any) -> bool:
    return hasattr(x, "role") and hasattr(x, "fan_in")


def factor_of(path: Any, parameter: Any, **settings: Any) -> float:
    if not has_role(parameter):
        raise ValueError(
            "unitscale.optim.umup: params must be variables with role, fan_in, fan_out and depth, "
            "as those of unitscale.nn layers are (nnx.state(model, nnx.Param)); "
            f"{path_name(path) or 'params'} has none; make a parameter of your own with them, as "
            "in nnx.Param(x, role='bias', fan_in=1, fan_out=1, depth=1)"
        )
    return rules.umup_learning_rate(
        parameter.role,
        fan_in=parameter.fan_in,
        fan_out=parameter.fan_out,
        depth=parameter.depth,
        **settings,
    )


def umup(
    inner: optax.GradientTransformation,
    params: Any,
    *,
    optimizer: Literal["adam", "sgd"] = "adam",
    readout_constraint: Literal["to_output_scale"] | None = None,
    multipliers: Mapping[str, float] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Gives every parameter its u-muP learning rate.

    Scaling:
        The updates of ``inner`` are multiplied by `rules.umup_learning_rate` of each parameter's
        role, fan-in, fan-out and depth. So would be a weight decay inside ``inner``: keep it
        outside, where it depends on neither learning rate nor schedule, by
        ``optax.chain(umup(optax.adam(schedule), params), independent_weight_decay(decay))``.

        Unit-scaled gradients give SGD updates of unit size too, and the same factors. A readout
        with a constraint takes its width from the gradients of all that comes before it; with
        ``optimizer="sgd"`` and that constraint the factors give it back.

        Beside unit-scaled gradients, which are far larger than those of a mean loss, Adam's usual
        ``eps`` of 1e-8 is nothing: parameters whose gradients only shrink take whole steps until
        these are lost. Give it one below unit size by less, such as 2^-12.

        ``multipliers`` are constants beside these. The global learning rate is the size of one
        update of a bias or a gain, but an update of a weight is spread over its fan-in: at a rate
        that is best for weights gains grow to a hundred in some thousand steps, and activations
        leave unit size with them. ``{"norm": 0.03, "bias": 0.03}`` keeps them; u-muP's own models
        have neither.

    Args:
        inner: an optax transformation.
        params: the parameters that will be trained, as variables that carry metadata:
            ``nnx.state(model, nnx.Param)``.
        optimizer: "adam" where updates do not depend on the size of gradients (adam, lion,
            rmsprop, muon, ...), "sgd" where they are in proportion to it.
        readout_constraint: that of the model's readout; it matters to "sgd" alone.
        multipliers: a further factor by role, 1 for those that are not named.

    Returns:
        optax.GradientTransformation over trees of the same structure, of variables or of arrays.

    Raises:
        ValueError: if a parameter has no role or an unknown one, for an unknown optimizer or
            constraint, or a multiplier of an unknown role or that is negative or not finite; in
            ``update``, if the tree of updates differs from ``params``.

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
    found, treedef = jax.tree.flatten_with_path(params, is_leaf=has_role)
    settings = {"optimizer": optimizer, "readout_constraint": readout_constraint}
    own = dict(multipliers or {})
    for role, multiplier in own.items():
        rules.umup_learning_rate(role, fan_in=1, fan_out=1)  # complains of a role that there is not
        if not 0 <= multiplier < math.inf:
            raise ValueError(
                f"unitscale.optim.umup: multipliers[{role!r}] must be finite and not negative; got "
                f"{multiplier}"
            )
    factors = [factor_of(path, x, **settings) * own.get(x.role, 1.0) for path, x in found]

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        updates, state = inner.update(updates, state, params, **extra_args)
        leaves, structure = jax.tree.flatten(updates, is_leaf=has_role)
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

"""u-muP: one learning rate for every width and depth, and weight decay independent of it."""

import itertools
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import optax

from .. import rules
from ._roles import path_name

# The equivalent kernel of a plain model is the unit-scaled one times this power of its fan-in.
_FORWARD_POWER = {"weight": -0.5, "readout": -1.0}


def _has_role(x: Any) -> bool:
    return hasattr(x, "role") and hasattr(x, "fan_in")


def _matrix_axes(path: Any, x: Any) -> optax.contrib.MuonDimensionNumbers | None:
    """Return the input and output axes of a hidden kernel, without axes of a stack; else None."""
    if not _has_role(x):
        raise ValueError(
            "unitscale.optim: params must be variables with role, fan_in, fan_out and depth, "
            "as nnx.state(model, nnx.Param) of unitscale.nn layers are; "
            f"got none of these for {path_name(path) or 'params'}. Create it with them, as in "
            "nnx.Param(x, role='bias', fan_in=1, fan_out=1, depth=1)"
        )
    if x.role != "weight":
        return None
    for first, split in itertools.combinations(range(len(x.shape)), 2):
        fans = math.prod(x.shape[first:split]), math.prod(x.shape[split:])
        if fans == (x.fan_in, x.fan_out):
            axes = tuple(range(first, split)), tuple(range(split, len(x.shape)))
            return optax.contrib.MuonDimensionNumbers(*axes)
    return None


def _factor_of(path: Any, parameter: Any, **settings: Any) -> float:
    if _matrix_axes(path, parameter) is None and settings.get("optimizer") == "muon":
        settings["optimizer"] = "adam"
    shape = {"fan_in": parameter.fan_in, "fan_out": parameter.fan_out, "depth": parameter.depth}
    return rules.umup_learning_rate(parameter.role, **shape, **settings)


def umup(
    inner: optax.GradientTransformation,
    params: Any,
    *,
    optimizer: Literal["adam", "sgd", "muon"] = "adam",
    readout_constraint: Literal["to_output_scale"] | None = None,
    multipliers: Mapping[str, float] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Give every parameter its u-muP learning rate.

    Start at ``umup_rates(params).start(rate)``, where ``rate`` is a plain model's Adam learning
    rate: at a width of 256 about 0.5 in place of 2e-3. With the plain rate, models learn slowly.

    Scaling:
        Updates are multiplied by `rules.umup_learning_rate` of each parameter's role and shape.
        That includes weight decay of ``inner``: use `independent_weight_decay` after it instead.

        Gradients are near 1 here, so Adam's usual ``eps`` of 1e-8 has no effect: parameters whose
        gradients decay take full-size steps until the gradients underflow. Use about 2^-12.

        At the best rate for weights, gains and biases (which u-muP's own models do not have) grow
        to a hundred in thousands of steps: pass ``multipliers={"norm": 0.03, "bias": 0.03}``.

    Args:
        inner: an optax transformation.
        params: parameters to train, as variables with metadata: ``nnx.state(model, nnx.Param)``.
        optimizer: "adam" if the size of updates does not depend on the gradients' size (adam, lion,
            rmsprop, ...), "sgd" if it is proportional to it, "muon" for Muon with `muon_axes`.
        readout_constraint: constraint of the model's readout; only "sgd" depends on it.
        multipliers: additional factors by role, 1 by default.

    Returns:
        optax.GradientTransformation over trees of the same structure, of variables or of arrays.

    Raises:
        ValueError: if a parameter has no role, an argument is invalid, or in ``update`` the tree of
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
    found, treedef = jax.tree.flatten_with_path(params, is_leaf=_has_role)
    settings = {"optimizer": optimizer, "readout_constraint": readout_constraint}
    own = dict(multipliers or {})
    for role, multiplier in own.items():
        rules.umup_learning_rate(role, fan_in=1, fan_out=1)  # rejects unknown roles
        if not 0 <= multiplier < math.inf:
            raise ValueError(
                f"unitscale.optim.umup: multipliers[{role!r}] must be finite and not negative; got "
                f"{multiplier}"
            )
    factors = [_factor_of(path, x, **settings) * own.get(x.role, 1.0) for path, x in found]

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        updates, state = inner.update(updates, state, params, **extra_args)
        leaves, structure = jax.tree.flatten(updates, is_leaf=_has_role)
        if structure != treedef:
            raise ValueError(
                "unitscale.optim.umup: updates must have the structure of the params given to "
                f"umup; got {structure}, expected {treedef}"
            )
        scaled = [optax.tree.scale(f, leaf) for f, leaf in zip(factors, leaves, strict=True)]
        return jax.tree.unflatten(structure, scaled), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def muon_axes(params: Any) -> Any:
    """Return the ``muon_weight_dimension_numbers`` of a model's hidden kernels.

    Other parameters (vectors, embeddings, the readout) get None: `optax.contrib.muon` updates them
    by Adam. With ``consistent_rms=1 / 32`` one learning rate suits both.

    Raises:
        ValueError: if a parameter has no role.
    """
    return jax.tree.map_with_path(_matrix_axes, params, is_leaf=_has_role)


class UmupRate(NamedTuple):
    """The learning rate of one parameter.

    Attributes:
        factor: u-muP's factor on the global learning rate.
        plain: at a global rate of 1, the equivalent learning rate of Adam in a plain model.
    """

    path: str
    role: str
    factor: float
    plain: float


class UmupRates(list[UmupRate]):
    """The learning rates of a model's parameters; prints as a table."""

    def start(self, plain: float) -> float:
        """Return the global rate equivalent to the rate ``plain`` of Adam in a plain model."""
        logs = [math.log(rate.plain) for rate in self if rate.role == "weight"]
        return plain / math.exp(sum(logs) / len(logs)) if logs else plain

    def __str__(self) -> str:
        width = max((len(rate.path) for rate in self), default=0)
        lines = [f"{'parameter':<{width}}  {'role':<9}  {'u-muP':<9}  in a plain model"]
        for path, role, factor, plain in self:
            lines.append(f"{path:<{width}}  {role:<9}  {factor:<9.4g}  {plain:.4g}")
        lines.append(
            f"Start at {self.start(1.0):.4g} x your plain model's Adam learning rate, and search "
            "around it by factors of two."
        )
        return "\n".join(lines)


def umup_rates(params: Any) -> UmupRates:
    """List the u-muP learning rate of every parameter, and its equivalent in a plain model.

    Scaling:
        A unit-scaled kernel W with fan-in n acts as W n^-1/2 in a plain model, and u-muP multiplies
        its updates by n^-1/2. So a rate r is equivalent to r / n for the kernel of a plain model: a
        rate of 0.5 at a width of 256 is equivalent to 2e-3.

    Args:
        params: as for `umup`.

    Raises:
        ValueError: if a parameter has no role.

    Example:
        >>> from flax import nnx
        >>> from unitscale import nn
        >>> rates = umup_rates(nnx.state(nn.Dense(256, 8, rngs=nnx.Rngs(0)), nnx.Param))
        >>> print(f"{rates.start(2e-3):.3f}")  # 256 times 2e-3
        0.512
    """
    found = UmupRates()
    for path, x in jax.tree.leaves_with_path(params, is_leaf=_has_role):
        factor = _factor_of(path, x)
        plain = factor * x.fan_in ** _FORWARD_POWER.get(x.role, 0.0)
        found.append(UmupRate(path_name(path), x.role, factor, plain))
    return found


def independent_weight_decay(decay: float, mask: Any = None) -> optax.GradientTransformation:
    """Remove the same share of every weight in every step.

    Scaling:
        w <- w - decay * w, in addition to the update. `optax.adamw` would multiply decay by u-muP's
        rates: ``optax.chain(umup(optax.adam(schedule), params), independent_weight_decay(1e-4))``.

    Args:
        decay: the share of a weight that a step removes, in [0, 1).
        mask: parameters that decay: a tree of booleans, or a function from parameters to one.

    Raises:
        ValueError: if decay is not in [0, 1).

    Example:
        >>> tx = independent_weight_decay(0.25)
        >>> updates, _ = tx.update([0.0], tx.init([8.0]), [8.0])
        >>> updates
        [-2.0]

    References:
        Blake et al., "u-muP", 2024, arXiv 2407.17465, section 3.1; Wortsman et al., "Small-scale
        proxies for large-scale Transformer training", 2023, arXiv 2309.14322, section 3.2.2.
    """
    if not 0 <= decay < 1:
        raise ValueError(
            f"unitscale.optim.independent_weight_decay: decay must be in [0, 1); got {decay!r}"
        )
    return optax.add_decayed_weights(-decay, mask)

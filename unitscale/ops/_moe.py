"""Mixture of experts: the router, its losses, and the sum of the experts that it chooses."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import rules
from ..core import (
    ScaledArray,
    custom_vjp,
    narrow,
    num_batch_shards,
    result_dtype,
    scale_bwd,
    upcast,
    widen,
)
from ._expert_axis import Places, divided_as, rows_of
from ._grouped import Groups
from ._linear import affine
from ._operands import ArrayLike, shape_error, unpack, unpack_uniform

Experts = Callable[[ScaledArray, Any, Groups], ArrayLike]
"""What a mixture's experts are to it: a function of sorted rows, parameters and groups."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["logits", "gates", "experts"],
    meta_fields=["mult", "renormalize", "shards"],
)
@dataclasses.dataclass(frozen=True)
class Routing:
    """Which experts see a token, and how much each of them counts.

    Attributes:
        logits: (tokens, experts), float32, before the multiplier.
        gates: (tokens, top_k), float32.
        experts: (tokens, top_k) integers, the largest logit first.
        mult: multiplier of the logits.
        renormalize: whether the gates of a token sum to 1.
        shards: number of parts of the batch that these tokens are one of.

    Example:
        >>> route(jnp.ones((4, 8)), jnp.ones((8, 3)), 2).gates.shape
        (4, 2)
    """

    logits: jax.Array
    gates: jax.Array
    experts: jax.Array
    mult: float
    renormalize: bool
    shards: int

    @property
    def top_k(self) -> int:
        """Number of experts of each token."""
        return self.experts.shape[1]

    @property
    def probabilities(self) -> jax.Array:
        """(tokens, experts): the softmax over all experts."""
        return jax.nn.softmax(self.logits * self.mult)

    def load_balancing_loss(self) -> jax.Array:
        """The loss that is least, 1, where all experts see as many tokens, with equal probability.

        Scaling:
            ``experts * sum(f * P)``, f being the share of choices that fall on each expert, P its
            mean probability; the gradient is by P alone. The value is the ordinary one; the mean's
            1/N is kept out of the backward, as in `softmax_cross_entropy`.

        Example:
            >>> print(route(jnp.zeros((4, 8)), jnp.ones((8, 2)), 2).load_balancing_loss())
            1.0

        References:
            Fedus, Zoph, Shazeer, "Switch Transformers", 2021, arXiv 2101.03961, equations 4 to 6,
            without the coefficient.
        """
        count = self.logits.shape[1]
        hits = jnp.sum(_hits(self.experts, count), (0, 1), dtype=jnp.float32)
        probabilities = dataclasses.replace(self, logits=self._kept_out()).probabilities
        shares = lax.stop_gradient(hits) / self.experts.size
        return count * jnp.sum(shares * jnp.mean(probabilities, 0))

    def z_loss(self) -> jax.Array:
        """The mean square of the log of the softmax's normalizer, which keeps logits small.

        Scaling:
            As `load_balancing_loss`: ordinary value, 1/N kept out of the backward.

        Example:
            >>> print(route(jnp.zeros((4, 8)), jnp.ones((8, 1)), 1).z_loss())
            0.0

        References:
            Zoph et al., "ST-MoE", 2022, arXiv 2202.08906, equation 5, without the coefficient.
        """
        return jnp.mean(jax.nn.logsumexp(self._kept_out() * self.mult, axis=-1) ** 2)

    def _kept_out(self) -> jax.Array:
        """Logits whose gradient is times the number of tokens."""
        return scale_bwd(self.logits, float(self.logits.shape[0] * self.shards))


def route(
    x: ArrayLike,
    kernel: ArrayLike,
    top_k: int,
    *,
    mult: float = 1.0,
    renormalize: bool = True,
    out_features: int | None = None,
) -> Routing:
    """Chooses the experts of each token: those of the largest logits, ``x @ kernel``.

    Scaling:
        logits = in^-1/2 * x.value @ kernel.value, in float32 whatever the operands are in, with the
        true gradient by ``x``; dkernel is unit at initialisation, given the cotangents that
        `mixture` gives to gates. See `rules.router`. A gate is an entry of the softmax, over the
        chosen experts if ``renormalize``, and its gradient the true one.

    Args:
        x: (..., in), floating: the tokens.
        kernel: (in, experts), floating.
        top_k: number of experts of each token.
        mult: static multiplier of the logits (inverse temperature).
        renormalize: whether the gates of a token sum to 1. If not they are probabilities among all
            experts, as one expert per token needs for a gradient of the router.
        out_features: size of the experts' outputs, which the gates' gradients sum over; that of x
            by default.

    Returns:
        `Routing` of tokens in one dimension.

    Raises:
        TypeError: if an operand is not floating.
        ValueError: if the shapes do not fit, or there are fewer experts than top_k.

    Example:
        >>> routing = route(jnp.ones((1, 4)), jnp.eye(4), 1)
        >>> print(routing.experts, routing.gates)
        [[0]] [[1.]]

    References:
        Jiang et al., "Mixtral of Experts", 2024, arXiv 2401.04088, equations 1 and 2 (renormalized
        gates); Fedus, Zoph, Shazeer, "Switch Transformers", 2021, arXiv 2101.03961, equations 1 and
        2, section 2.4 (float32).
    """
    mult = float(mult)
    rule = partial(
        rules.router, top_k=top_k, out_features=out_features, mult=mult, renormalize=renormalize
    )
    operands = unpack("route", "x", x), unpack("route", "kernel", kernel)
    tokens, matrix = (ScaledArray(widen(data), scale) for data, scale in operands)
    product = affine("route", rule, tokens, matrix, None, "to_output_scale", None, None)
    logits = rows_of(widen(product.value))
    values, experts = lax.top_k(logits * mult, top_k)
    if renormalize:
        gates = jax.nn.softmax(values)
    else:
        gates = jnp.exp(values - jax.nn.logsumexp(logits * mult, axis=-1, keepdims=True))
    return Routing(logits, gates, experts, mult, renormalize, num_batch_shards(logits))


def _hits(experts: jax.Array, count: int) -> jax.Array:
    """Which expert each is, as booleans along a new last axis."""
    classes = lax.broadcasted_iota(experts.dtype, (*experts.shape, count), experts.ndim)
    return experts[..., None] == classes


class _Order:
    """Rows sorted by expert: one for each token and each of its experts."""

    def __init__(self, experts: jax.Array, count: int) -> None:
        """Args: experts (tokens, top_k), in [0, count] where count is for those elsewhere."""
        order = jnp.argsort(experts.ravel(), stable=True)
        ranks = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
        self.token = order // experts.shape[1]
        self.row = ranks.reshape(experts.shape)
        self.sizes = jnp.sum(_hits(experts.ravel(), count), 0, dtype=jnp.int32)


@partial(custom_vjp, nondiff_argnums=(3,))
def _dispatch(x, token, row, factor):
    return x[token]


def _dispatch_bwd(factor, row, cotangent):
    # Each token's rows add up in float32 and are rounded once, after the factor.
    total = jnp.sum(widen(cotangent[row]), axis=1)
    return narrow(total * factor, cotangent.dtype), None, None


_dispatch.defvjp(
    lambda x, token, row, factor: (_dispatch(x, token, row, factor), row), _dispatch_bwd
)


@partial(custom_vjp, nondiff_argnums=(4, 5))
def _combine(y, gates, token, row, factors, out_dtype):
    chosen = widen(y[row])  # `jnp.take` forgets an axis of no tokens
    return narrow(factors.fwd * jnp.sum(chosen * gates[..., None], axis=1), out_dtype)


def _combine_fwd(y, gates, token, row, factors, out_dtype):
    return _combine(y, gates, token, row, factors, out_dtype), (y, gates, token, row)


def _combine_bwd(factors, out_dtype, residuals, cotangent):
    y, gates, token, row = residuals
    wide = widen(cotangent[token])
    gate = jnp.zeros(row.size, gates.dtype).at[row.ravel()].set(gates.ravel())
    grad_y = narrow(factors.bwd[0] * gate[:, None] * wide, y.dtype)
    grad_gates = jnp.sum(widen(y) * wide, axis=-1)[row]
    return grad_y, (factors.bwd[1] * grad_gates).astype(gates.dtype), None, None


_combine.defvjp(_combine_fwd, _combine_bwd)


def mixture(
    fn: Experts,
    x: ArrayLike,
    routing: Routing,
    params: Any,
    *,
    expert_axis: str = "expert",
) -> ScaledArray:
    """Applies to each token the experts that were chosen for it, and adds up what they return.

    Scaling:
        data = c * sum of gate * fn(x).data over the experts of a token, c being E[sum gate^2]^-1/2,
        which makes a unit sum of unit outputs. Gradients inside of ``fn`` are times top_k^1/2 and
        unit; at the way in they are divided by it again, so those of ``x`` and of the gates are
        true. See `rules.mixture`.

        No token is dropped, and no capacity reserved: rows are sorted by expert, and
        `grouped_dense` multiplies each group by its kernel. Where the mesh of the context
        (`jax.set_mesh`, or that of a `jax.shard_map` around) has the axis ``expert_axis``, each of
        its devices computes the experts that it has for all tokens that it sees, and the results
        are summed over the axis. Explicit axes that divide tokens go on dividing them; parameters
        are gathered along those.

    Args:
        fn: function of rows (tokens * top_k, features), parameters, and the `Groups` of the rows,
            that returns as many rows, made of `grouped_dense` and functions of each row.
        x: (..., features), floating: the tokens of `route`, in the same order.
        routing: of `route`.
        params: tree of what ``fn`` needs; arrays of a parameter have a leading dimension of the
            experts. Inside `jax.shard_map` over the axis, those of this device's experts.
        expert_axis: name of the axis that divides the experts; one that is not there divides none.

    Returns:
        ScaledArray (..., out features), in the dtype that ``fn`` returns.

    Raises:
        TypeError: if ``x`` is not floating.
        ValueError: if the routing is of another number of tokens, or the devices do not divide the
            experts.

    Example:
        >>> routing = route(jnp.ones((3, 4)), jnp.eye(4), 1)
        >>> kernel = jnp.ones((4, 4, 2))
        >>> from unitscale.ops import grouped_dense
        >>> y = mixture(
        ...     lambda h, w, groups: grouped_dense(h, w, groups), jnp.ones((3, 4)), routing, kernel
        ... )
        >>> print(y.data[0])
        [2. 2.]

    References:
        Shazeer et al., "Outrageously Large Neural Networks", 2017, arXiv 1701.06538, equation 1;
        Gale et al., "MegaBlocks", 2022, arXiv 2211.15841.
    """
    data, scale = unpack_uniform("mixture", "x", x, tuple(range(jnp.ndim(x))))
    tokens, count = routing.logits.shape
    if data.ndim < 1 or math.prod(data.shape[:-1]) != tokens:
        raise shape_error(
            "mixture",
            f"x must be (..., features) with the {tokens} tokens of the routing",
            "Route the same tokens.",
            x=data.shape,
        )
    factors = rules.mixture(
        count, routing.top_k, mult=routing.mult, renormalize=routing.renormalize
    )
    total = max(routing.experts.size, 1) * routing.shards
    places = Places.of(data, expert_axis, count)

    def run(x, scale, gates, chosen, params):
        order = _Order(*places.own(chosen))
        rows = _dispatch(places.seen(x), order.token, order.row, factors.bwd[2])
        y = fn(ScaledArray(rows, scale), params, Groups(order.sizes, total, count))
        y, y_scale = unpack_uniform("mixture", "fn(x)", y, (0, 1))
        dtype = result_dtype(y)
        wide = dtype if places.ways == 1 else jnp.float32
        y = _combine(y, gates, order.token, order.row, factors, wide)
        return places.total(y, y_scale, dtype)

    flat = rows_of(data)
    flat = upcast(flat, result_dtype(flat))
    y, y_scale = places.map(run, flat, scale, routing.gates, routing.experts, params)
    y = divided_as(y.reshape(*data.shape[:-1], y.shape[-1]), data)
    return ScaledArray(y, y_scale)


@partial(custom_vjp, nondiff_argnums=(2,))
def _attach(y, loss, weight):
    return y


_attach.defvjp(
    lambda y, loss, weight: (y, None),
    lambda weight, _, cotangent: (cotangent, jnp.float32(weight)),
)


def attach_loss(x: ArrayLike, loss: jax.Array, weight: float) -> ScaledArray:
    """Returns ``x``, whose backward pass adds the gradient of ``weight * loss``.

    So a layer deep inside of a model, under a scan or rematerialization, has a loss of its own that
    need not be returned. The value of the model's loss does not hold it.

    Args:
        x: floating array or ScaledArray on the way from the loss's parameters to the model's loss.
        loss: scalar.
        weight: static number.

    Returns:
        ScaledArray equal to ``x``.

    Example:
        >>> def loss(w):
        ...     return jnp.sum(attach_loss(2 * w, w**2, 0.5).value)
        >>> print(loss(3.0), jax.grad(loss)(3.0))
        6.0 5.0

    References:
        Fedus, Zoph, Shazeer, "Switch Transformers", 2021, arXiv 2101.03961, equation 4 (alpha).
    """
    data, scale = unpack_uniform("attach_loss", "x", x, ())
    return ScaledArray(_attach(data, jnp.asarray(loss, jnp.float32), float(weight)), scale)

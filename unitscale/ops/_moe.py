"""Mixture of experts: routing, router losses, grouped dense layers, and sharded experts."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from .. import rules
from ..core import (
    ScaledArray,
    batch_size_override,
    custom_vjp,
    narrow,
    num_batch_shards,
    result_dtype,
    scale_bwd,
    upcast,
    varying,
    widen,
)
from ..quant import MatmulConfig, QuantState, group_of, grouped
from ..rules import Constraint
from ._linear import affine
from ._operands import ArrayLike, combine, multiply_scales, output_dtype, shape_error, unpack


@partial(jax.tree_util.register_dataclass, data_fields=["sizes"], meta_fields=["rows", "groups"])
@dataclasses.dataclass(frozen=True)
class Groups:
    """Sizes of groups of consecutive rows, such as the tokens of each expert.

    Attributes:
        sizes: (groups,) integers, rows in each group. Rows beyond their sum belong to no group.
        rows: total number of rows on all devices.
        groups: total number of groups on all devices.
    """

    sizes: jax.Array
    rows: int
    groups: int

    def of_rows(self, count: int) -> jax.Array:
        """Return the group of each of ``count`` rows; the number of groups for rows of no group."""
        return group_of(self.sizes, jnp.arange(count))


def grouped_dense(
    x: ArrayLike,
    kernel: ArrayLike,
    groups: Groups,
    bias: ArrayLike | None = None,
    *,
    constraint: Constraint = "to_output_scale",
    config: MatmulConfig | None = None,
    state: QuantState | None = None,
) -> ScaledArray:
    """Apply a dense layer with a separate kernel for each group of rows.

    Scaling: `rules.grouped_dense`; scales as in `dense`.

    Args:
        x: (rows, in), floating, sorted by group.
        kernel: (groups, in, out), floating.
        groups: sizes of the groups.
        bias: (groups, out), or None.
        constraint: see `unitscale.ops`.
        config: see `unitscale.ops`.
        state: see `unitscale.ops`.

    Returns:
        ScaledArray (rows, out) in the promoted dtype, or with ``config`` in the dtype of ``x``.
        Rows of no group are zero.

    Example:
        >>> kernel = jnp.stack([jnp.ones((4, 2)), jnp.zeros((4, 2))])
        >>> groups = Groups(jnp.array([1, 1]), rows=2, groups=2)
        >>> print(grouped_dense(jnp.ones((2, 4)), kernel, groups).data)
        [[2. 2.]
         [0. 0.]]

    References:
        Gale et al., "MegaBlocks", 2022, arXiv 2211.15841.
    """
    data, x_scale = unpack("grouped_dense", "x", x, ...)
    w, w_scale = unpack("grouped_dense", "kernel", kernel, ...)
    count = groups.sizes.shape[0]
    if w.ndim != 3 or data.ndim != 2 or w.shape[:2] != (count, data.shape[1]):
        expected = f"x must be (rows, in) and kernel ({count}, in, out), one for each group"
        raise shape_error("grouped_dense", expected, x=data.shape, kernel=w.shape)
    rows, (_, inputs, outputs) = max(groups.rows, 1), w.shape
    factors = rules.grouped_dense(inputs, outputs, rows, groups.groups, constraint=constraint)
    dtype, both = output_dtype(x, kernel) if config is None else output_dtype(x), factors.bwd[:2]
    own = (factors.fwd, *both)
    y = grouped(data, w, groups.sizes, factors=own, config=config, out_dtype=dtype, state=state)
    result = multiply_scales(y, x_scale, w_scale)
    if bias is None:
        return ScaledArray(*result)
    b, b_scale = unpack("grouped_dense", "bias", bias, ...)
    if b.shape != (count, outputs):
        expected = f"bias must be ({count}, {outputs}), one row for each group"
        raise shape_error("grouped_dense", expected, bias=b.shape)
    of_rows = jnp.take(widen(b), groups.of_rows(y.shape[0]), axis=0, mode="fill", fill_value=0)
    return combine(result, (of_rows, b_scale), bwd=(1.0, factors.bwd[2]))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["logits", "gates", "experts"],
    meta_fields=["mult", "renormalize", "shards"],
)
@dataclasses.dataclass(frozen=True)
class Routing:
    """The experts chosen for each token, and their weights; the result of `route`.

    Attributes:
        logits: (tokens, experts), float32, not yet multiplied by ``mult``.
        gates: (tokens, top_k), float32, the weights of the chosen experts.
        experts: (tokens, top_k), indices of the chosen experts, by descending logit.
        mult: multiplier of the logits.
        renormalize: whether the gates of a token sum to 1.
        shards: number of shards of the global batch; these tokens are one of them.
    """

    logits: jax.Array
    gates: jax.Array
    experts: jax.Array
    mult: float
    renormalize: bool
    shards: int

    @property
    def top_k(self) -> int:
        """Number of experts chosen for each token."""
        return self.experts.shape[1]

    @property
    def probabilities(self) -> jax.Array:
        """Softmax of the logits over all experts, (tokens, experts)."""
        return jax.nn.softmax(self.logits * self.mult)

    def load_balancing_loss(self) -> jax.Array:
        """Return the load-balancing loss, which is 1 for equally loaded experts.

        Scaling: ``experts * sum(f * P)``, where f is an expert's share of the tokens * top_k
        assignments, and P its mean probability. Gradients flow through P only, and omit 1/N as in
        `softmax_cross_entropy`.

        References:
            Fedus, Zoph, Shazeer, "Switch Transformers", 2021, arXiv 2101.03961, equations 4 to 6
            (without their coefficient).
        """
        count = self.logits.shape[1]
        hits = jnp.sum(_one_hot(self.experts, count), (0, 1), dtype=jnp.float32)
        probabilities = dataclasses.replace(self, logits=self._summed_logits()).probabilities
        shares = lax.stop_gradient(hits) / max(self.experts.size, 1)
        return count * jnp.sum(shares * _mean(probabilities))

    def z_loss(self) -> jax.Array:
        """Return the mean square of logsumexp(logits), a loss that keeps logits small.

        Scaling: as in `load_balancing_loss`.

        References:
            Zoph et al., "ST-MoE", 2022, arXiv 2202.08906, equation 5 (without its coefficient).
        """
        return _mean(jax.nn.logsumexp(self._summed_logits() * self.mult, axis=-1) ** 2)

    def _summed_logits(self) -> jax.Array:
        """Return the logits; multiply their gradient by the batch size of factors."""
        tokens = batch_size_override() or self.logits.shape[0] * self.shards
        return scale_bwd(self.logits, float(tokens))


def _mean(x: jax.Array) -> jax.Array:
    """Return the mean over the first axis; 0 if it is empty."""
    return jnp.sum(x, 0) / max(x.shape[0], 1)


def route(
    x: ArrayLike,
    kernel: ArrayLike,
    top_k: int,
    *,
    mult: float = 1.0,
    renormalize: bool = True,
    out_features: int | None = None,
) -> Routing:
    """Choose the experts with the largest logits ``x @ kernel`` for each token.

    Scaling: `rules.router`, in float32, with operands multiplied by their scales. The gates are a
    softmax of the logits, over the chosen experts if ``renormalize``; their gradient is exact.

    Args:
        x: (..., in), floating, the tokens.
        kernel: (in, experts), floating.
        top_k: number of experts to choose for each token.
        mult: static multiplier of the logits (inverse temperature).
        renormalize: whether the gates of a token sum to 1. With top_k 1 they are then constant, and
            the router gets no gradient.
        out_features: number of output features of the experts; by default that of x.

    Example:
        >>> routing = route(jnp.ones((1, 4)), jnp.eye(4), 1)
        >>> print(routing.experts, routing.gates)
        [[0]] [[1.]]

    References:
        Jiang et al., "Mixtral of Experts", 2024, arXiv 2401.04088, equations 1 and 2; Fedus, Zoph,
        Shazeer, "Switch Transformers", 2021, arXiv 2101.03961, equations 1 and 2, section 2.4.
    """
    mult = float(mult)
    rule = partial(
        rules.router, top_k=top_k, out_features=out_features, mult=mult, renormalize=renormalize
    )
    operands = unpack("route", "x", x), unpack("route", "kernel", kernel)
    tokens, matrix = (ScaledArray(widen(data), scale) for data, scale in operands)
    product = affine("route", rule, tokens, matrix, None, "to_output_scale")
    logits = token_rows(widen(product.value))
    values, experts = lax.top_k(logits * mult, top_k)
    if renormalize:
        gates = jax.nn.softmax(values)
    else:
        gates = jnp.exp(values - jax.nn.logsumexp(logits * mult, axis=-1, keepdims=True))
    return Routing(logits, gates, experts, mult, renormalize, num_batch_shards(logits))


def _one_hot(experts: jax.Array, count: int) -> jax.Array:
    classes = lax.broadcasted_iota(experts.dtype, (*experts.shape, count), experts.ndim)
    return experts[..., None] == classes


@partial(custom_vjp, nondiff_argnums=(3,))
def _dispatch(x, token, row, factor):
    return x[token]


def _dispatch_bwd(factor, row, cotangent):
    # Sum the rows of each token in float32, multiply by the factor, and round once.
    total = jnp.sum(widen(cotangent[row]), axis=1)
    return narrow(total * factor, cotangent.dtype), None, None


_dispatch.defvjp(
    lambda x, token, row, factor: (_dispatch(x, token, row, factor), row), _dispatch_bwd
)


@partial(custom_vjp, nondiff_argnums=(4, 5))
def _gather(y, gates, token, row, factors, out_dtype):
    chosen = widen(y[row])  # not jnp.take, which loses the sharding of an empty batch
    return narrow(factors.fwd * jnp.sum(chosen * gates[..., None], axis=1), out_dtype)


def _gather_fwd(y, gates, token, row, factors, out_dtype):
    return _gather(y, gates, token, row, factors, out_dtype), (y, gates, token, row)


def _gather_bwd(factors, out_dtype, residuals, cotangent):
    y, gates, token, row = residuals
    wide = widen(cotangent[token])
    gate = jnp.zeros(row.size, gates.dtype).at[row.ravel()].set(gates.ravel())
    grad_y = narrow(factors.bwd[0] * gate[:, None] * wide, y.dtype)
    grad_gates = jnp.sum(widen(y) * wide, axis=-1)[row]
    return grad_y, (factors.bwd[1] * grad_gates).astype(gates.dtype), None, None


_gather.defvjp(_gather_fwd, _gather_bwd)


def mixture(
    fn: Callable[[ScaledArray, Any, Groups], ArrayLike],
    x: ArrayLike,
    routing: Routing,
    params: Any,
    *,
    expert_axis: str = "expert",
) -> ScaledArray:
    """Apply the chosen experts to each token, and add their outputs weighted by the gates.

    Scaling: `rules.mixture`. ``fn`` gets the scale of x, and the result has the scale that ``fn``
    returns. Gradients inside ``fn`` are unit scaled; the gradients of x and the gates are exact.

    No token is dropped. If the mesh has the axis ``expert_axis``, each device along it applies its
    own experts to its tokens, and the results are summed over the axis.

    Args:
        fn: ``fn(rows, params, groups)`` applies the experts to rows (tokens * top_k, features)
            that are sorted by expert. Use `grouped_dense`, and functions of each row.
        x: (..., features), floating: the same tokens, in the same order, as given to `route`.
        routing: the result of `route`.
        params: pytree of arrays whose first dimension is the expert. Inside `jax.shard_map` over
            the expert axis it holds only the experts of this device.
        expert_axis: name of the mesh axis that shards the experts, if the mesh has one.

    Example:
        >>> routing = route(jnp.ones((3, 4)), jnp.eye(4), 1)
        >>> kernel = jnp.ones((4, 4, 2))
        >>> print(mixture(grouped_dense, jnp.ones((3, 4)), routing, kernel).data[0])
        [2. 2.]

    References:
        Shazeer et al., "Outrageously Large Neural Networks", 2017, arXiv 1701.06538, equation 1.
    """
    data, scale = unpack("mixture", "x", x, ...)
    tokens, count = routing.logits.shape
    if data.ndim < 1 or math.prod(data.shape[:-1]) != tokens:
        expected = f"x must be (..., features) with the {tokens} tokens of the routing"
        raise shape_error("mixture", expected, x=data.shape)
    factors = rules.mixture(
        count, routing.top_k, mult=routing.mult, renormalize=routing.renormalize
    )
    total = max(routing.experts.size, 1) * routing.shards
    devices = ExpertDevices.of(data, expert_axis, count)

    def run(x, scale, gates, chosen, params):
        chosen, own = devices.own_experts(chosen)
        # There is one row for each token and each of its chosen experts; sort rows by expert.
        order = jnp.argsort(chosen.ravel(), stable=True)
        ranks = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
        token, row = order // chosen.shape[1], ranks.reshape(chosen.shape)
        sizes = jnp.sum(_one_hot(chosen.ravel(), own), 0, dtype=jnp.int32)
        rows = _dispatch(devices.vary(x), token, row, factors.bwd[2])
        y = fn(ScaledArray(rows, scale), params, Groups(sizes, total, count))
        y, y_scale = unpack("mixture", "fn(x)", y, ...)
        dtype = result_dtype(y)
        wide = dtype if devices.size == 1 else jnp.float32
        return devices.sum(_gather(y, gates, token, row, factors, wide), y_scale, dtype)

    flat = token_rows(data)
    flat = upcast(flat, result_dtype(flat))
    y, y_scale = devices.map(run, flat, scale, routing.gates, routing.experts, params)
    return ScaledArray(reshard_like(y.reshape(*data.shape[:-1], y.shape[-1]), data), y_scale)


@partial(custom_vjp, nondiff_argnums=(2,))
def _attach(y, loss, weight):
    return y


_attach.defvjp(
    lambda y, loss, weight: (y, None), lambda weight, _, cotangent: (cotangent, jnp.float32(weight))
)


def attach_loss(x: ArrayLike, loss: jax.Array, weight: float) -> ScaledArray:
    """Return ``x`` unchanged; the backward pass adds the gradient of ``weight * loss``.

    Args:
        x: any activation that the model's loss depends on.
        loss: scalar auxiliary loss.
        weight: static weight of the auxiliary loss.

    Example:
        >>> def loss(w):
        ...     return jnp.sum(attach_loss(2 * w, w**2, 0.5).value)
        >>> print(loss(3.0), jax.grad(loss)(3.0))
        6.0 5.0
    """
    data, scale = unpack("attach_loss", "x", x, ())
    return ScaledArray(_attach(data, jnp.asarray(loss, jnp.float32), float(weight)), scale)


def token_rows(x: jax.Array) -> jax.Array:
    """Reshape (..., features) to (tokens, features), sharded as the first dimension was."""
    own = jax.typeof(x).sharding
    kept = own.spec[:1] if x.ndim > 1 else ()
    if any(own.spec[len(kept) :]):
        x = jax.sharding.reshard(x, NamedSharding(own.mesh, PartitionSpec(*kept)))
    return x.reshape(-1, x.shape[-1])


def reshard_like(y: jax.Array, x: jax.Array) -> jax.Array:
    """Shard the token dimensions of ``y`` over explicit mesh axes like those of ``x``."""
    own = jax.typeof(x).sharding
    spec = PartitionSpec(*own.spec[:-1], None)
    return y if not any(spec) else jax.sharding.reshard(y, NamedSharding(own.mesh, spec))


class ExpertDevices(NamedTuple):
    """How a mesh shards the experts and tokens of a mixture."""

    axis: str  # mesh axis that shards the experts
    size: int  # number of devices along it; 1 if the mesh has no such axis
    manual: bool  # whether an enclosing `jax.shard_map` maps it
    experts: int  # total number of experts
    explicit: frozenset[str]  # the explicit mesh axes
    tokens: tuple[str, ...]  # the explicit mesh axes that shard the tokens

    @classmethod
    def of(cls, x: jax.Array, axis: str, experts: int) -> "ExpertDevices":
        mesh = jax.sharding.get_abstract_mesh()
        size, manual = mesh.shape.get(axis, 1), axis in mesh.manual_axes
        if experts % size:
            raise ValueError(
                f"unitscale.ops.mixture: the {size} devices of the axis {axis!r} must divide the "
                f"{experts} experts. Change the mesh, or name another axis with expert_axis=."
            )
        if manual and size > 1:
            if axis not in varying(lax.axis_index(axis)):
                raise ValueError(
                    f"unitscale.ops.mixture: inside jax.shard_map over {axis!r} gradients need "
                    "check_vma=True; got False."
                )
            if axis in varying(x):
                raise ValueError(
                    f"unitscale.ops.mixture: each device of the axis {axis!r} must see the same "
                    "tokens; got tokens that vary over it. Shard the batch over another axis."
                )
        first = tuple(jax.typeof(x).sharding.spec[:1]) if x.ndim > 1 else ()
        tokens = tuple(name for name in jax.tree.leaves(first) if name != axis)
        return cls(axis, size, manual, experts, frozenset(mesh.explicit_axes), tokens)

    def map(self, run: Callable[..., Any], *args: Any) -> tuple[jax.Array, Any]:
        """Run ``run(x, scale, gates, chosen, params)`` on each device, for the device's experts."""
        by_expert = {self.axis} if self.size > 1 and not self.manual else set()
        names = by_expert | self.explicit
        if not names:
            return run(*args)

        def param_spec(x: Any) -> PartitionSpec:
            is_param = not isinstance(x, QuantState) and jnp.shape(x)[:1] == (self.experts,)
            return PartitionSpec(self.axis) if by_expert and is_param else PartitionSpec()

        rows, whole = PartitionSpec(self.tokens or None), PartitionSpec()
        params = jax.tree.map(param_spec, args[-1], is_leaf=lambda x: isinstance(x, QuantState))
        specs = rows, whole, rows, rows, params
        if self.explicit:
            args = jax.tree.map(
                lambda spec, tree: jax.tree.map(lambda x: jax.sharding.reshard(x, spec), tree),
                specs,
                args,
            )
        return jax.shard_map(run, in_specs=specs, out_specs=(rows, whole), axis_names=names)(*args)

    def own_experts(self, chosen: jax.Array) -> tuple[jax.Array, int]:
        """Return `chosen` as indices of this device's experts, others as `count`; and `count`."""
        count = self.experts // self.size
        own = chosen - (lax.axis_index(self.axis) * count if self.size > 1 else 0)
        return jnp.where((own >= 0) & (own < count), own, count), count

    def vary(self, x: jax.Array) -> jax.Array:
        """Mark tokens as varying over the expert axis, so that JAX sums gradients in float32."""
        if self.size == 1:
            return x
        return lax.pcast(widen(x), self.axis, to="varying").astype(x.dtype)

    def sum(self, y: jax.Array, scale: Any, dtype: Any) -> tuple[jax.Array, Any]:
        """Sum the results of all devices, at their largest scale."""
        if self.size == 1:
            return y, scale
        if scale is not None:
            own, scale = scale, lax.pmax(scale, self.axis)
            y = y * (own / scale)
        return narrow(lax.psum(y, self.axis), dtype), scale

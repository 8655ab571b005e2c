"""Describe the training step of a config without running it: parameters, FLOPs and bytes.

Everything follows from shapes and the lowered program.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from unitscale.core import is_scaled
from unitscale.ops import attention_paths

from .config import RunConfig
from .hf import Frozen
from .recipe import recipe_of
from .run.state import TrainState
from .run.step import abstract_step, make_loss, over_amax


class Bytes(NamedTuple):
    """Bytes of the arrays of a step, on all devices together."""

    frozen: int
    """Parameters that are not trained."""
    weights: int
    """Trained parameters in their storage format, scales included."""
    gradients: int
    optimizer: int
    activations: int
    """Saved for the backward pass of a batch, before XLA fuses operations."""


class Description(NamedTuple):
    parameters: dict[str, int]
    """Number of parameters, frozen ones included, by part of the model."""
    trained: int
    flops: float
    """FLOPs of forward pass, backward pass and update, with all iterations of scans."""
    total: Bytes


def describe(config: RunConfig) -> Description:
    """Trace and lower the training step of a config, with shapes in place of arrays."""
    config = config.resumed  # except in recipe finetune, do not read the weights in `init`
    graphdef, step, shapes = abstract_step(config)
    state, loss = shapes[0], make_loss(graphdef, deterministic=False)
    one, two = (_saved_bytes(loss, state, config, size) for size in (1, 2))
    with attention_paths("plain"):  # XLA does not count a kernel's FLOPs
        flops = _flops(step.trace(*shapes))
    frozen = nnx.split_state(state.rest, Frozen, ...)[0]
    parameters: dict[str, int] = {}
    for tree in (state.params, frozen):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled):
            part = str(getattr(path[0], "key", path[0]))
            parameters[part] = parameters.get(part, 0) + math.prod(leaf.shape)
    return Description(
        parameters=parameters,
        trained=sum(x.size for x in jax.tree.leaves(state.params, is_leaf=is_scaled)),
        flops=flops,
        total=Bytes(
            frozen=bytes_of(frozen),
            weights=bytes_of(state.params),
            gradients=_gradient_bytes(config, state.params),
            optimizer=bytes_of(state.opt_state),
            activations=(two - one) * config.data.batch_size,
        ),
    )


def _gradient_bytes(config: RunConfig, params: Any) -> int:
    """Return the bytes of gradients; micro-batches add them up in float32."""
    if config.precision.scalify:  # gradients have the parameters' formats
        return bytes_of(params)
    narrow = jnp.dtype(config.precision.gradients or jnp.float32).itemsize
    more = 4 if config.data.micro_batches > 1 and narrow < 4 else 0
    sizes = [(x.size, x.ndim) for x in jax.tree.leaves(params, is_leaf=is_scaled)]
    return sum(size * (more + (narrow if ndim > 1 else 4)) for size, ndim in sizes)


def bytes_of(tree: Any) -> int:
    """Count the bytes of arrays. XLA packs two 4-bit numbers into a byte."""

    def bits(dtype: Any) -> int:
        return 4 if dtype == jnp.float4_e2m1fn else 8 * dtype.itemsize

    return sum(math.prod(x.shape) * bits(x.dtype) // 8 for x in jax.tree.leaves(tree))


def _saved_bytes(loss: Callable, state: TrainState, config: RunConfig, size: int) -> int:
    """Count the bytes saved for the backward pass of `size` examples, parameters included."""

    def backward(params: Any, rest: Any, batch: Any) -> Any:
        amax, of_amax = over_amax(loss, rest)
        return jax.vjp(lambda params, amax: of_amax(params, amax, batch), params, amax)[1]

    data = config.data.model_copy(update={"batch_size": size})
    batch = recipe_of(config).abstract_batch(config.model_copy(update={"data": data}))
    return bytes_of(jax.eval_shape(backward, state.params, state.rest, batch))


def program_flops(jaxpr: ClosedJaxpr) -> float:
    """Count the FLOPs of a program, including every iteration of scans, which XLA counts once."""
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
    return _flops(jax.jit(jaxpr_as_fun(jaxpr)).trace(*shapes))


def _flops(traced: Any) -> float:
    cost = traced.lower().cost_analysis()
    assert cost is not None, "XLA counts the FLOPs of a lowered program on every platform"
    return cost["flops"] + _of_further_turns(traced.jaxpr.jaxpr)


def _of_further_turns(jaxpr: Jaxpr) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        for inner in inner_programs(eqn):
            total += _of_further_turns(getattr(inner, "jaxpr", inner))
            if eqn.primitive.name == "scan":
                total += (eqn.params["length"] - 1) * program_flops(inner)
    return total


def inner_programs(eqn: Any) -> list[Any]:
    def is_jaxpr(x: Any) -> bool:
        return isinstance(x, (ClosedJaxpr, Jaxpr))

    leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)
    return [leaf for leaf in leaves if is_jaxpr(leaf)]


def report(config: RunConfig) -> Iterator[str]:
    facts = describe(config)
    count, data = sum(facts.parameters.values()), config.data
    yield f"{config.name}: recipe {config.recipe}, policy {config.precision.policy}"
    yield f"parameters    {count:>22,}"
    for part, own in facts.parameters.items():
        yield f"  {part:<12}{own:>22,}"
    if facts.trained != count:
        yield f"trained       {facts.trained:>22,}"
    yield f"step          {data.step_size:>22,} {data.step_unit} in {data.batch_size} examples"
    each = f"{facts.flops / data.step_size:.4g} for each of the {data.step_unit}"
    yield f"FLOPs a step  {facts.flops:>22.4g}, {each}"
    yield "bytes of a step, on all devices"
    for name, count in (*facts.total._asdict().items(), ("in all", sum(facts.total))):
        if count:
            note = ", at most: before XLA fuses" if name == "activations" else ""
            yield f"  {name:<12}{count:>22,} bytes{note}"

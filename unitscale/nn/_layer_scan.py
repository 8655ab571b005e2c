"""Layers of one structure as one layer with stacked state, run by `jax.lax.scan`.

A program then holds one layer, however many there are: it compiles in the time of one.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from ..core import ScaledArray, as_scaled, is_scaled, to_float

Layer = TypeVar("Layer", bound=nnx.Module)


def stack_layers(layers: Sequence[Layer]) -> Layer:
    """Returns one module whose state is that of all layers, stacked on a leading axis.

    Args:
        layers: modules of the same structure and shapes; they may differ in their state alone.

    Returns:
        A module of the same type, for `jax.lax.scan` or `nnx.scan`. A ScaledArray has one scale
        per layer.

    Raises:
        ValueError: if there is no layer, or the structures differ.

    Example:
        >>> from unitscale import nn
        >>> layers = [nn.Dense(4, 4, rngs=nnx.Rngs(i)) for i in range(3)]
        >>> stack_layers(layers).kernel.shape
        (3, 4, 4)
    """
    split = [nnx.split(layer) for layer in layers]
    if not split or any(graphdef != split[0][0] for graphdef, _ in split):
        raise ValueError(
            f"unitscale.nn.stack_layers: expected layers of one structure; got {len(split)} that "
            "differ in type, options or parameters"
        )
    states = [state for _, state in split]
    return nnx.merge(split[0][0], jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))


def unstack_layers(stack: Layer) -> list[Layer]:
    """Returns the layers that `stack_layers` stacked.

    Args:
        stack: a module with stacked state.

    Returns:
        One module per entry of the leading axis.

    Raises:
        ValueError: if the module has no state.

    Example:
        >>> from unitscale import nn
        >>> layers = [nn.Dense(4, 4, rngs=nnx.Rngs(i)) for i in range(3)]
        >>> unstack_layers(stack_layers(layers))[1].kernel.shape
        (4, 4)
    """
    graphdef, params, rest = nnx.split(stack, nnx.Param, ...)
    leaves = jax.tree.leaves((params, rest))
    if not leaves:
        raise ValueError("unitscale.nn.unstack_layers: expected a module with stacked state")
    params = _with_stacked_scales(params)
    return [
        nnx.merge(graphdef, *jax.tree.map(lambda leaf: leaf[i], (params, rest)))  # noqa: B023
        for i in range(leaves[0].shape[0])
    ]


def scan_layers(
    call: Callable[[Any, ScaledArray, Any], Any],
    stack: Any,
    x: Any,
    xs: Any,
    *,
    checkpoint: Callable[[Any], Any],
) -> ScaledArray:
    """Applies each layer of a stack to the result of the one before.

    Args:
        call: function of a layer, its input and its entry of ``xs``; its result is the next input.
        stack: as `stack_layers` makes it. State that a layer changes is changed in it.
        x: input of the first layer, an array or ScaledArray.
        xs: tree of arrays with one entry per layer.
        checkpoint: `jax.checkpoint` of the step of a layer, or a function that returns it as it is.

    Returns:
        The result of the last layer.
    """
    graphdef, params, rest = nnx.split(stack, nnx.Param, ...)
    old, structure = jax.tree.flatten(rest)
    changed: list[int] = []

    def body(h: Any, item: Any) -> Any:
        own, leaves, entry = item
        layer = nnx.merge(graphdef, own, jax.tree.unflatten(structure, leaves))
        y = call(layer, h, entry)
        new = jax.tree.leaves(nnx.split(layer, nnx.Param, ...)[2])
        changed[:] = [i for i, (a, b) in enumerate(zip(leaves, new, strict=True)) if a is not b]
        return y, [new[i] for i in changed]

    items = (_with_stacked_scales(params), old, xs)
    x = x if is_scaled(x) else ScaledArray(x)
    like = jax.eval_shape(
        lambda h, items: body(h, jax.tree.map(lambda a: a[0], items))[0], x, items
    )

    def step(h: ScaledArray, item: Any) -> Any:
        y, updates = body(h, item)
        return _with_scale_of(y, h), updates

    y, updates = jax.lax.scan(checkpoint(step), _with_scale_of(x, like), items)
    if changed:
        for i, update in zip(changed, updates, strict=True):
            old[i] = update
        nnx.update(stack, jax.tree.unflatten(structure, old))
    return y


def _with_stacked_scales(params: Any) -> Any:
    """Parameters with one scale per layer, also where an optimizer gave all layers one."""
    return jax.tree.map(
        lambda p: as_scaled(p, stack_axes=1) if is_scaled(p) else p, params, is_leaf=is_scaled
    )


def _with_scale_of(x: ScaledArray, like: ScaledArray) -> ScaledArray:
    """The same value with a scale of the shape that both have together: what a scan can carry."""
    scales = [s for s in (x.full_scale, like.scale) if s is not None]
    if not scales:
        return x
    shape = jnp.broadcast_shapes(*(s.shape for s in scales))
    return ScaledArray(x.data, jnp.broadcast_to(to_float(x.full_scale), shape))

"""What the axes of a mesh divide, by their names, where the compiler divides a program."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ._scaled_array import ScaledArray

BATCH_AXES = ("fsdp", "data")
"""Names of the axes that divide a batch, for `constrain_sharding`."""
CONTEXT_AXES = ("context",)
"""Those that divide the tokens of a sequence, for `constrain_sharding`."""
TENSOR_AXES = ("tensor",)
"""Those that divide matrices along hidden units and heads, for `constrain_sharding`."""


def batch_axes(mesh: Any) -> tuple[str, ...]:
    """The axes of a mesh that a batch is divided over: fsdp and data, where it has them.

    In this order: on a mesh of data 2, fsdp 2, tensor 2, with the batch over ``("data", "fsdp")``
    and matrices over ``("fsdp", "tensor")``, XLA's partitioner gives wrong gradients of two
    products in a row (on CPUs, jax 0.10.2 and 0.12.0.1).

    Example:
        >>> batch_axes(jax.make_mesh((1, 1), ("fsdp", "tensor"), devices=jax.devices()[:1]))
        ('fsdp',)
    """
    return tuple(name for name in BATCH_AXES if name in mesh.shape)


def axes_size(names: Sequence[str]) -> int:
    """Into how many parts axes divide a dimension, of the mesh of `jax.set_mesh`.

    Those count that are left to the compiler (`jax.sharding.AxisType.Auto`).

    Example:
        >>> axes_size(("context",))
        1
    """
    sizes = _left_to_the_compiler()
    return math.prod(sizes.get(name, 1) for name in names)


def dividing_axes(
    names: Sequence[str], sizes: Mapping[str, int], *dimensions: int
) -> tuple[str, ...]:
    """The axes of these names that a mesh has, where together they divide all dimensions; else ().

    Example:
        >>> (
        ...     dividing_axes(("fsdp", "data"), {"data": 4}, 8, 12),
        ...     dividing_axes(("data",), {"data": 4}, 6),
        ... )
        (('data',), ())
    """
    own = tuple(name for name in names if name in sizes)
    axes_size = math.prod(sizes[name] for name in own)
    return own if all(dimension % axes_size == 0 for dimension in dimensions) else ()


def constrain_sharding(x: jax.Array, *dimensions: Sequence[str] | None) -> jax.Array:
    """Returns an array that lies over axes of the mesh of `jax.set_mesh`, and so does its gradient.

    Left to itself, XLA's partitioner may move activations to where the weights lie in place of
    gathering weights. This is what tells it, in a program that is traced under a mesh.

    Args:
        x: a traced array; any other comes back as it is.
        dimensions: for each of the first dimensions the names of the axes that divide it, of those
            that are left to the compiler; () for a dimension that is whole. None, axes that the
            mesh has not, and a dimension that they do not divide are left to the compiler, as are
            the other dimensions.

    Example:
        >>> constrain_sharding(jax.numpy.ones((4, 2)), ("data",)).shape
        (4, 2)
    """
    if not isinstance(x, Tracer):
        return x
    sizes = _left_to_the_compiler()
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    for axis, names in enumerate(dimensions):
        if names is not None and not names:
            spec[axis] = None
            continue
        if own := dividing_axes(names or (), sizes, x.shape[axis]):
            spec[axis] = own
    if not sizes or all(place is PartitionSpec.UNCONSTRAINED for place in spec):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def reshard(x: jax.Array, sharding: NamedSharding | PartitionSpec | None) -> jax.Array:
    """Returns an array that lies as a call asks; None for as it comes.

    Products need not be told: on explicit axes their outputs lie as their inputs do, and parts of a
    sum are added. So this is a move there, and its gradient the move back; of axes that are left to
    the compiler it tells the compiler.

    Example:
        >>> reshard(jax.numpy.ones(2), None).shape
        (2,)
    """
    if sharding is None:
        return x
    own = isinstance(sharding, NamedSharding)
    mesh: Any = sharding.mesh if own else jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def shard_activations(x: Any) -> Any:
    """Returns a residual stream (batch, time, ...) that lies where its batch does.

    On a mesh of `jax.set_mesh` that is left to the compiler, that is over its axes fsdp, data and
    context. Weights then come to the activations, each in the format that it is multiplied in.

    Args:
        x: array or ScaledArray.

    Example:
        >>> shard_activations(ScaledArray(jax.numpy.ones((4, 8, 2)))).shape
        (4, 8, 2)
    """
    if isinstance(x, ScaledArray):
        return x.map_data(shard_activations)
    return constrain_sharding(x, BATCH_AXES, CONTEXT_AXES)


def _left_to_the_compiler() -> Mapping[str, int]:
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in mesh.auto_axes if mesh.shape[name] > 1}

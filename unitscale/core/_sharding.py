"""Global batch sizes and sharding constraints, by the names of mesh axes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ._compat import varying
from ._scaled_array import is_scaled

# A part of the keys of JAX's caches, so that what was traced inside is not used outside.
_AXES: Any = jax.make_user_context(None)
_ITEMS: Any = jax.make_user_context(None)


@contextmanager
def batch_over(axis_name: str | Sequence[str | int]) -> Iterator[None]:
    """Name the mapped axes that divide the batch, while a function is traced.

    Scaling:
        Factors that contain a batch size (gradients of parameters, and losses that keep the 1/N of
        a mean out of the backward pass) mean the global batch, so that the mean of such gradients
        over devices is the gradient on one device. Under `jax.jit` ops see the whole batch. Inside
        `jax.shard_map` they see a part, and multiply by the sizes of the axes that activations
        vary over, by JAX's types. This context restricts these to the axes named here. Use it where
        activations vary over an axis that does not divide the batch (experts, parts of a tensor),
        and under ``check_vma=False``, which has no such types: there all axes named here count.
        `jax.vmap` without ``axis_name`` hides its axis: each example counts as a batch of its own.

        A loss without its 1/N has n times the gradient of its part, because the mean over n parts
        divides by n. In narrow formats differentiate `jax.lax.pmean` of the loss, so that
        cotangents stay near unit RMS.

    Args:
        axis_name: names of axes of `jax.shard_map` or `jax.vmap`; () for none. A name that is not
            mapped around an op divides nothing. An integer is a number of micro-batches.

    Example:
        >>> import jax.numpy as jnp
        >>> from unitscale import ops
        >>> x = jnp.ones((4, 2))
        >>> def loss(w, x):
        ...     return ops.dense(x, w).value.sum()
        >>> each = jax.vmap(jax.grad(loss), (None, 0), axis_name="examples")
        >>> with batch_over("examples"):
        ...     total = each(jnp.ones((2, 3)), x[:, None]).sum(0)
        >>> print(total[0], jax.grad(loss)(jnp.ones((2, 3)), x)[0])
        [2. 2. 2.] [2. 2. 2.]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (the batch size in
        gradients of weights); the guide of `jax.shard_map` on ``check_vma``.
    """
    with _AXES((axis_name,) if isinstance(axis_name, str) else tuple(axis_name)):
        yield


@contextmanager
def batch_size(items: int) -> Iterator[None]:
    """Set the batch size that factors assume, while a function is traced.

    Scaling:
        The gradient of a weight is scaled by (number of items)^-1/2; a mean loss keeps its 1/N out
        of the backward pass. If a loss applies the same weights to inputs of several sizes (queries
        and documents, several resolutions), each use would have another constant, and the gradient
        another direction. Within this context all uses have the same constant.

    Args:
        items: tokens, rows or positions on all devices together; best near the largest of them.

    Raises:
        ValueError: if it is not a positive integer.

    Example:
        >>> import jax.numpy as jnp
        >>> from unitscale import ops
        >>> def loss(w):
        ...     with batch_size(4):
        ...         query = ops.dense(jnp.ones((1, 2)), w)
        ...         documents = ops.dense(jnp.ones((4, 2)), w)
        ...     return query.value.sum() + 2 * documents.value.sum()
        >>> print(jax.grad(loss)(jnp.ones((2, 3)))[0])  # (1 + 2 * 4) / 4^1/2
        [4.5 4.5 4.5]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, section 4.2 (constraints where
        an edge is not cut), appendix on scaled ops (the batch size in gradients of weights).
    """
    if isinstance(items, bool) or not isinstance(items, int) or items < 1:
        raise ValueError(f"unitscale.batch_size: items must be a positive integer; got {items!r}")
    with _ITEMS(items):
        yield


def global_batch_size(items: int, *activations: jax.Array) -> int:
    """Return the batch size of an op, counted over all devices, or what `batch_size` set."""
    return max(items, 1) * num_batch_shards(*activations) if _ITEMS.value is None else _ITEMS.value


def batch_size_override() -> int | None:
    """Return what `batch_size` set, or None."""
    return _ITEMS.value


def num_batch_shards(*activations: jax.Array) -> int:
    """Return the number of parts of the batch that activations are one part of, while tracing."""
    varied = frozenset().union(*map(varying, activations))
    named = _AXES.value
    if named is None:
        named = varied
    parts = [axis for axis in named if isinstance(axis, int)]
    axes = [a for a in named if a in varied or (isinstance(a, str) and _is_untracked(a))]
    return math.prod(parts) * math.prod(lax.axis_size(axis) for axis in axes)


def _is_untracked(axis: str) -> bool:
    """Return whether an axis is mapped and JAX does not track what varies over it."""
    try:
        return axis not in varying(lax.axis_index(axis))
    except NameError:
        return False


BATCH_AXES = ("fsdp", "data")
"""Names of the mesh axes that divide a batch, for `constrain_sharding`."""
CONTEXT_AXES = ("context",)
"""Names of the mesh axes that divide the tokens of a sequence, for `constrain_sharding`."""
TENSOR_AXES = ("tensor",)
"""Names of the mesh axes that divide hidden units and heads, for `constrain_sharding`."""


def batch_axes(mesh: Any) -> tuple[str, ...]:
    """Return the axes of a mesh that divide the batch: those of `BATCH_AXES` that it has.

    The order matters: on a mesh of data 2, fsdp 2, tensor 2, with the batch over ``("data",
    "fsdp")`` and matrices over ``("fsdp", "tensor")``, XLA's partitioner computes wrong gradients
    of two matmuls in a row (on CPUs, jax 0.10.2 and 0.12.0.1).
    """
    return tuple(name for name in BATCH_AXES if name in mesh.shape)


def axes_size(names: Sequence[str]) -> int:
    """Return the product of the sizes of axes of type `Auto` in the mesh of `jax.set_mesh`."""
    sizes = _auto_axes()
    return math.prod(sizes.get(name, 1) for name in names)


def dividing_axes(
    names: Sequence[str], sizes: Mapping[str, int], *dimensions: int
) -> tuple[str, ...]:
    """Return the axes of these names, if their product divides all dimensions; else ()."""
    own = tuple(name for name in names if name in sizes)
    size = math.prod(sizes[name] for name in own)
    return own if all(dimension % size == 0 for dimension in dimensions) else ()


def constrain_sharding(x: jax.Array, *dimensions: Sequence[str] | None) -> jax.Array:
    """Constrain the sharding of an array and of its cotangent by the names of mesh axes.

    Without it XLA's partitioner may move activations to the weights instead of gathering weights.

    Args:
        x: a traced array; concrete arrays are returned unchanged.
        dimensions: for each of the first dimensions, the names of the axes of type `Auto` that
            divide it; () for a replicated dimension. None, axes that the mesh lacks and a dimension
            that they do not divide are left to the compiler, as are the other dimensions.
    """
    if not isinstance(x, Tracer):
        return x
    sizes = _auto_axes()
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    for axis, names in enumerate(dimensions):
        if names is not None:
            own = dividing_axes(names, sizes, x.shape[axis])
            spec[axis] = own or (PartitionSpec.UNCONSTRAINED if names else None)
    if not sizes or all(part is PartitionSpec.UNCONSTRAINED for part in spec):
        return x
    return lax.with_sharding_constraint(x, PartitionSpec(*spec))


def reshard(x: jax.Array, sharding: NamedSharding | PartitionSpec | None) -> jax.Array:
    """Reshard to the ``out_sharding`` of a call; None leaves the array as it is.

    On explicit axes the cotangent is resharded back; on other axes it is a sharding constraint.
    """
    if sharding is None:
        return x
    mesh: Any = getattr(sharding, "mesh", None) or jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return lax.with_sharding_constraint(x, sharding)


def shard_activations(x: Any) -> Any:
    """Shard a residual stream (batch, time, ...) along the batch and context axes.

    Then weights are gathered, in the format that they are multiplied in, rather than activations.
    """
    if is_scaled(x):
        return x.map_data(shard_activations)
    return constrain_sharding(x, BATCH_AXES, CONTEXT_AXES)


def _auto_axes() -> Mapping[str, int]:
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in mesh.auto_axes if mesh.shape[name] > 1}

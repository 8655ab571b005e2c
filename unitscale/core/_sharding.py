"""Global batch sizes and sharding constraints, for named mesh axes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ._autodiff import quantized_gradient
from ._compat import varying
from ._formats import materialize, narrow, widen
from ._scaled_array import is_scaled

# These contexts are part of JAX's cache keys: functions traced inside are not reused outside.
_AXES: Any = jax.make_user_context(None)
_ITEMS: Any = jax.make_user_context(None)
_EXCHANGE: Any = jax.make_user_context(None)


@contextmanager
def batch_over(axis_name: str | Sequence[str | int]) -> Iterator[None]:
    """Name the mapped axes that shard the batch, while a function is traced.

    Scaling:
        Factors of parameter gradients, and of losses that omit the 1/N of a mean in the backward
        pass, depend on the batch size. They use the global one, so that the mean of gradients over
        devices equals the gradient on one device. Under `jax.jit` ops see the whole batch. Inside
        `jax.shard_map` they see one shard, and multiply its size by the sizes of the axes that
        activations vary over, as JAX tracks them. This context counts only the axes named here. Use
        it if activations vary over an axis that does not shard the batch (experts, tensor
        parallelism), and with ``check_vma=False``: JAX then tracks nothing, and all named axes
        count. In `jax.vmap` without an ``axis_name`` each example is a batch of its own.

        The gradient of a mean loss over one of n shards is multiplied by n, because the mean over
        shards divides by n. In narrow formats differentiate `jax.lax.pmean` of the loss, so that
        cotangents stay near RMS 1.

    Args:
        axis_name: names of axes of `jax.shard_map` or `jax.vmap`; () for none. Names that are not
            mapped around an op are ignored. An integer is a number of micro-batches.

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
    """Set the batch size that factors use, while a function is traced.

    Scaling:
        Gradients of weights are scaled by (number of items)^-1/2, and mean losses omit 1/N in the
        backward pass. If a loss applies the same weights to inputs of several sizes (queries and
        documents, several resolutions), each use gets a different constant, which changes the
        direction of the gradient. Inside this context all uses get the same constant.

    Args:
        items: number of tokens, rows or positions on all devices; choose about the largest size.

    Raises:
        ValueError: if ``items`` is not a positive integer.

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
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, section 4.2 (constraints on
        edges that are not cut), appendix on scaled ops (batch size in gradients of weights).
    """
    if isinstance(items, bool) or not isinstance(items, int) or items < 1:
        raise ValueError(f"unitscale.batch_size: items must be a positive integer; got {items!r}")
    with _ITEMS(items):
        yield


def global_batch_size(items: int, *activations: jax.Array) -> int:
    """Return the batch size of an op over all devices, or the one that `batch_size` set."""
    return max(items, 1) * num_batch_shards(*activations) if _ITEMS.value is None else _ITEMS.value


def batch_size_override() -> int | None:
    """Return the batch size that `batch_size` set, or None."""
    return _ITEMS.value


def num_batch_shards(*activations: jax.Array) -> int:
    """Return the number of shards of the global batch, if ``activations`` are one of them."""
    varied = frozenset().union(*map(varying, activations))
    named = varied if _AXES.value is None else _AXES.value
    parts = [axis for axis in named if isinstance(axis, int)]
    axes = [a for a in named if a in varied or (isinstance(a, str) and _is_untracked(a))]
    return math.prod(parts) * math.prod(lax.axis_size(axis) for axis in axes)


def _is_untracked(axis: str) -> bool:
    """Return whether an axis is mapped, but JAX does not track which arrays vary over it."""
    try:
        return axis not in varying(lax.axis_index(axis))
    except NameError:
        return False


BATCH_AXES = ("fsdp", "data")
"""Mesh axes that shard a batch, for `constrain_sharding`."""
CONTEXT_AXES = ("context",)
"""Mesh axes that shard the tokens of a sequence, for `constrain_sharding`."""
TENSOR_AXES = ("tensor",)
"""Mesh axes that shard hidden units and heads, for `constrain_sharding`."""


def batch_axes(mesh: Any) -> tuple[str, ...]:
    """Return the axes in `BATCH_AXES` that a mesh has, in that order.

    The order matters: with the batch sharded over ``("data", "fsdp")`` and matrices over ``("fsdp",
    "tensor")``, each axis of size 2, XLA's partitioner computes wrong gradients for two matmuls in
    a row (on CPUs, jax 0.10.2 and 0.12.0.1).
    """
    return tuple(name for name in BATCH_AXES if name in mesh.shape)


def axes_size(names: Sequence[str]) -> int:
    """Return the number of devices along these axes of type `Auto`, in `jax.set_mesh`'s mesh."""
    return math.prod(auto_axes().get(name, 1) for name in names)


def dividing_axes(
    names: Sequence[str], sizes: Mapping[str, int], *dimensions: int
) -> tuple[str, ...]:
    """Return the ``names`` in ``sizes``, or () if their product does not divide all dimensions."""
    own = tuple(name for name in names if name in sizes)
    size = math.prod(sizes[name] for name in own)
    return own if all(dimension % size == 0 for dimension in dimensions) else ()


def constrain_sharding(x: jax.Array, *dimensions: Sequence[str] | None) -> jax.Array:
    """Constrain the sharding of an array and of its cotangent over named mesh axes.

    Without constraints XLA's partitioner may move activations instead of gathering weights.

    Args:
        x: a traced array; concrete arrays are returned unchanged.
        dimensions: for each leading dimension of x, the names of axes of type `Auto` that shard it;
            () to replicate it, None to let the compiler choose. The compiler also chooses for other
            dimensions, for axes that the mesh lacks, and if axes do not divide a dimension evenly.
    """
    if not isinstance(x, Tracer):
        return x
    sizes = auto_axes()
    spec: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    for axis, names in enumerate(dimensions):
        if names is not None:
            own = dividing_axes(names, sizes, x.shape[axis])
            spec[axis] = own or (PartitionSpec.UNCONSTRAINED if names else None)
    if not sizes or all(part is PartitionSpec.UNCONSTRAINED for part in spec):
        return x
    return lax.with_sharding_constraint(x, PartitionSpec(*spec))


def reshard(x: jax.Array, sharding: NamedSharding | PartitionSpec | None) -> jax.Array:
    """Reshard an array to a call's ``out_sharding``; None leaves it unchanged.

    On explicit mesh axes it reshards; on other axes it adds a sharding constraint.
    """
    if sharding is None:
        return x
    mesh: Any = getattr(sharding, "mesh", None) or jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(x, sharding)
    return lax.with_sharding_constraint(x, sharding)


def fsdp_dimension(
    shape: Sequence[int], devices: int, dimensions: Sequence[int] = (-2, -1)
) -> int | None:
    """Return the dimension of a parameter that the mesh axis fsdp shards, or None."""
    fitting = [d for d in dimensions if shape[d] % devices == 0]
    return max(fitting, key=lambda d: shape[d]) if fitting else None


def fsdp_devices() -> int:
    """Return the number of devices along the mesh axis fsdp; 1 if other axes shard weights too."""
    sizes = auto_axes()
    return sizes.get("fsdp", 1) if set(sizes) <= {*BATCH_AXES, *CONTEXT_AXES} else 1


def reshard_bits(x: jax.Array, *shardings: Sequence[Sequence[str] | None]) -> jax.Array:
    """Apply sharding constraints to the bits of an array, which XLA cannot widen in transit."""
    bits = lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint16)
    bits = materialize(bits)  # or XLA would remove the conversions
    for dimensions in shardings:
        bits = constrain_sharding(bits, *dimensions)
    return lax.bitcast_convert_type(bits, x.dtype)


def exchange_in(dtype: Any) -> Any:
    """Return the context of `parallel.exchange_gradients`, without its checks."""
    return _EXCHANGE(dtype)


def parts_to_exchange(items: int) -> int:
    """Return the number of partial sums, one per device, of a weight gradient over ``items``."""
    devices = 1 if _EXCHANGE.value is None else auto_axes().get("fsdp", 1)
    return 1 if items % devices else devices


def sum_parts(parts: jax.Array) -> jax.Array:
    """Sum a weight gradient over devices, in the format of `parallel.exchange_gradients`.

    Args:
        parts: one partial sum per device, sharded over `BATCH_AXES` along the first dimension.
    """
    devices, dtype = parts.shape[0], _EXCHANGE.value
    place = None if dtype is None or parts.ndim != 3 else fsdp_dimension(parts.shape, devices)
    if place is None:
        return jnp.sum(parts, 0)
    rounded = quantized_gradient(constrain_sharding(parts, BATCH_AXES), dtype)
    data = rounded.data if is_scaled(rounded) else rounded
    pieces = [BATCH_AXES if d == place else () for d in range(-parts.ndim, 0)]
    wide = widen(reshard_bits(data, [BATCH_AXES], pieces))
    if is_scaled(rounded):
        scales = constrain_sharding(jnp.asarray(rounded.scale), BATCH_AXES)
        wide = wide * constrain_sharding(scales, (), (), ())
    return narrow(jnp.sum(wide, 0), parts.dtype)


def shard_activations(x: Any) -> Any:
    """Shard a residual stream (batch, time, ...) along the batch and context axes.

    XLA then gathers weights, in the format of their matmul, and not activations.
    """
    if is_scaled(x):
        return x.map_data(shard_activations)
    return constrain_sharding(x, BATCH_AXES, CONTEXT_AXES)


def auto_axes() -> Mapping[str, int]:
    """Return the axes of type `Auto` with several devices, in `jax.set_mesh`'s mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name: mesh.shape[name] for name in mesh.auto_axes if mesh.shape[name] > 1}

"""Collectives that quantize what they send: all_reduce, reduce_scatter and all_gather.

XLA may widen FP8 in transit (a CPU gathers it as float16), so data is sent as unsigned integers
with the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from ..core import (
    MAX_EXPONENT,
    CastRounding,
    Format,
    ScaledArray,
    amax,
    auto_axes,
    cast,
    check_choice,
    exchange_in,
    exponent_of,
    exponent_to_fit,
    gradients_format,
    is_float8,
    is_scaled,
    narrow,
    pow2,
    storage_of,
    widen,
)

AxisName: TypeAlias = str | tuple[str, ...]
"""A mesh axis, or several that count as one: see `all_reduce`."""

_SharedScale: TypeAlias = tuple[jax.Array, jax.Array]  # a scale and its inverse


def _dtype(fmt: Format) -> np.dtype:
    assert fmt.dtype is not None, "storage_of rejects simulated formats"
    return fmt.dtype


def axis_size(where: str, axis_name: AxisName) -> int:
    """Return the number of devices along the axis; raise an error outside of shard_map."""
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"unitscale.parallel.{where}: axis_name must be an axis of the surrounding "
            f"jax.shard_map; got {axis_name!r}. Call it inside shard_map."
        ) from None


def _gradient_leaves(where: str, grads: Any, axis_name: AxisName) -> tuple[list[jax.Array], Any]:
    """Return leaves and structure of gradients, after checking that they can be averaged."""

    def varying(x: Any) -> frozenset:
        return jax.typeof(x).manual_axis_type.varying

    names = {axis_name} if isinstance(axis_name, str) else set(axis_name)
    is_tracked = bool(varying(lax.axis_index(axis_name)))  # not under check_vma=False
    leaves = jax.tree.leaves(grads, is_leaf=is_scaled)
    if any(is_scaled(x) and is_float8(x.dtype) for x in leaves):
        raise TypeError(
            f"unitscale.parallel.{where}: grads must be plain arrays; got ScaledArrays in FP8. "
            "Call to_array(grads) first: data and scale would be averaged separately."
        )
    found, structure = jax.tree.flatten_with_path(grads)
    for path, leaf in found:
        name = f"grads{jax.tree_util.keystr(path)}"
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"unitscale.parallel.{where}: {name} must be floating; got dtype "
                f"{jnp.result_type(leaf)}. Leave it out, or give it to jax.lax.psum."
            )
        if is_tracked and not names <= varying(leaf):
            raise ValueError(
                f"unitscale.parallel.{where}: {name} must differ between the devices of "
                f"{axis_name!r}; got a value that is the same on all. jax.grad with respect to "
                "replicated parameters has summed it already: differentiate with respect to "
                f"jax.lax.pcast(params, {axis_name!r}, to='varying')."
            )
    return [jnp.asarray(leaf) for _, leaf in found], structure


def _device_keys(
    where: str, rounding: CastRounding, key: jax.Array | None, axis_name: AxisName, count: int
) -> Sequence[Any]:
    """Return one key per tensor, different on each device so that devices round differently."""
    check_choice(f"unitscale.parallel.{where}", "rounding", rounding, CastRounding)
    if rounding == "nearest":
        return [None] * count
    if key is None:
        raise ValueError(
            f"unitscale.parallel.{where}: rounding='stochastic' needs key=, a jax.random key that "
            "is the same on all devices; got None"
        )
    own = jax.random.fold_in(key, lax.axis_index(axis_name))
    return list(jax.random.split(own, count)) if count else []


def agree(
    leaves: Sequence[jax.Array], formats: Sequence[Format], mus: Sequence[Any], axis_name: AxisName
) -> list[_SharedScale]:
    """Return one power-of-two scale per tensor and its inverse, the same on all devices.

    scale = 2^ceil(log2(amax / max)) / mu, with the largest magnitude ``amax`` on any device; NaN if
    a value is not finite. The scale is 1 for formats with the exponents of float32, and for zeros.
    """
    one = jnp.float32(1)
    scales = [(one, one)] * len(leaves)
    wanted = [i for i, fmt in enumerate(formats) if fmt.exponent_bits < 8]
    if not wanted:
        return scales
    largest = jnp.stack([amax(leaves[i]).astype(jnp.float32) for i in wanted])
    # Compare as integers: these order magnitudes as floats do, and NaN above infinity everywhere.
    bits = lax.bitcast_convert_type(largest, jnp.int32) & 0x7FFFFFFF
    largest = lax.bitcast_convert_type(lax.pmax(bits, axis_name), jnp.float32)
    for i, top in zip(wanted, largest, strict=True):
        exponent = exponent_to_fit(top, formats[i]) - exponent_of(jnp.float32(mus[i]))
        # XLA may flush subnormal numbers to zero, so a tensor of zeros must not get a tiny scale.
        exponent = jnp.where(top == 0, 0, jnp.clip(exponent, -MAX_EXPONENT, MAX_EXPONENT))
        finite = jnp.isfinite(top)
        exponent = jnp.where(finite, exponent, 0)
        scales[i] = jnp.where(finite, pow2(exponent), jnp.nan), pow2(-exponent)
    return scales


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def encode(x: jax.Array, fmt: Format, key: jax.Array | None = None) -> jax.Array:
    """Round data to a format of 8 or 16 bits, saturating, and return the bits."""
    rounding = "nearest" if key is None else "stochastic"
    data = cast(x, fmt, rounding, key, saturate=fmt.exponent_bits < 8)
    return lax.bitcast_convert_type(data, jnp.uint8 if _dtype(fmt).itemsize == 1 else jnp.uint16)


def _encode_fwd(*_: Any) -> Any:
    raise TypeError(
        "unitscale.parallel: an exchange has no derivative. Differentiate with respect to its "
        "results, and exchange the gradients."
    )


encode.defvjp(_encode_fwd, lambda *_: ())


def _scatter_mean(
    parts: jax.Array, fmt: Format, shared: _SharedScale, axis_name: AxisName, key: Any
) -> jax.Array:
    """Return, on device i, the mean of part i over all devices, divided by the scale."""
    bits = encode(widen(parts) * shared[1], fmt, key)
    received = lax.bitcast_convert_type(lax.all_to_all(bits, axis_name, 0, 0), _dtype(fmt))
    return jnp.sum(widen(received), axis=0) / received.shape[0]


def _unscaled(data: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """Return ``data * scale`` in a dtype; numbers that were rounded beyond its range saturate."""
    limit = jnp.float32(jnp.finfo(dtype).max) / scale
    return narrow(lax.clamp(-limit, data, limit) * scale, dtype)


def _gather(bits: Any, fmt: Format, axis_name: AxisName, axis: int = 0) -> jax.Array:
    """Concatenate the parts of all devices along ``axis``; the same result on every device."""
    gathered = lax.all_gather(bits, axis_name, axis=axis, tiled=True, to="invarying")
    return lax.bitcast_convert_type(gathered, _dtype(fmt))


def exchange(
    where: str,
    grads: Any,
    mu: Any,
    axis_name: AxisName,
    dtype: Any,
    rounding: CastRounding,
    key: jax.Array | None,
    small: int,
    small_dtype: Any,
    count: bool = False,
) -> tuple[Any, list[jax.Array]]:
    """Run `all_reduce`; if ``count``, also return the share of saturated entries per leaf."""
    devices = axis_size(where, axis_name)
    large = storage_of(f"parallel.{where}: dtype", dtype)
    little = storage_of(f"parallel.{where}: small_dtype", small_dtype)
    leaves, structure = _gradient_leaves(where, grads, axis_name)
    mus = [mu] * len(leaves)
    if jax.tree.structure(mu) == structure:
        mus = jax.tree.leaves(mu)
    elif jax.tree.structure(mu) != jax.tree.structure(0):
        raise ValueError(
            f"unitscale.parallel.{where}: mu must be a number, or a tree of numbers as grads; got "
            f"{jax.tree.structure(mu)}"
        )
    known = [float(m) for m in mus if not isinstance(m, Tracer)]
    if not all(2.0**-126 <= m < 2.0**127 for m in known):
        raise ValueError(f"unitscale.parallel.{where}: mu must be from 2**-126 to 2**127; got {mu}")
    keys = _device_keys(where, rounding, key, axis_name, len(leaves))
    formats = [large if leaf.size >= small else little for leaf in leaves]
    shared = agree(leaves, formats, mus, axis_name)

    def mean(leaf: jax.Array, fmt: Format, shared: _SharedScale, key: Any) -> jax.Array:
        if _dtype(fmt).itemsize == 4 or not leaf.size:
            return narrow(lax.pmean(widen(leaf), axis_name), leaf.dtype)
        first, second = (None, None) if key is None else jax.random.split(key)
        parts = jnp.pad(leaf.reshape(-1), (0, -leaf.size % devices)).reshape(devices, -1)
        own = _scatter_mean(parts, fmt, shared, axis_name, first)
        data = widen(_gather(encode(own, fmt, second), fmt, axis_name))
        return _unscaled(data[: leaf.size].reshape(leaf.shape), shared[0], leaf.dtype)

    def share_beyond(leaf: jax.Array, fmt: Format, shared: _SharedScale) -> jax.Array:
        share = jnp.mean(jnp.abs(widen(leaf)) * shared[1] > fmt.max, dtype=jnp.float32)
        return jnp.where(jnp.isnan(shared[0]), 1, share)

    saturated = []
    if count and leaves:
        beyond = jnp.stack(list(map(share_beyond, leaves, formats, shared)))
        saturated = list(lax.pmean(beyond, axis_name))
    return jax.tree.unflatten(structure, list(map(mean, leaves, formats, shared, keys))), saturated


def all_reduce(
    grads: Any,
    axis_name: AxisName,
    dtype: Any = jnp.float8_e4m3fn,
    *,
    mu: Any = 1.0,
    rounding: CastRounding = "nearest",
    key: jax.Array | None = None,
    small: int = 1024,
    small_dtype: Any = jnp.float32,
) -> Any:
    """Average gradients over a mesh axis, sending them in FP8.

    Scaling:
        1. All devices agree on one power-of-two scale per tensor: the smallest that brings the
           largest magnitude on any device into the format's range, divided by ``mu``.
        2. Each rounds g / scale to ``dtype``, saturating, and sends part i to device i (an
           all-to-all). Device i averages what it received in float32.
        3. The mean is rounded to ``dtype`` at the same scale and sent to all (an all-gather).

        Each of n devices sends 2 (n - 1) / n bytes per element, a quarter of a float32 all-reduce.
        Rounding to nearest loses entries below the format's smallest value times the scale (2^-17
        of the largest in float8_e4m3fn); stochastic rounding keeps them on average.

    Args:
        grads: tree of floating arrays with the same shapes on all devices, inside `jax.shard_map`.
            ScaledArrays from `jax.grad` (whose scale is zero) count as trees.
        axis_name: mesh axis, or several axes that are treated as one.
        dtype: format of the exchange: float8, float16, bfloat16, or float32 (`jax.lax.pmean`).
        mu: positive factor on the data, rounded down to a power of two; a number or a tree of
            numbers with the structure of ``grads``. Above 1 the largest entries may saturate, and
            small ones are rounded more precisely (see `AutoScale`).
        rounding: "nearest" or "stochastic", which is unbiased and different on each device.
        key: `jax.random` key for stochastic rounding, the same on all devices.
        small: leaves with fewer entries are exchanged in ``small_dtype``.
        small_dtype: format for small leaves.

    Returns:
        The tree of means, in the input dtypes, with the same bits on all devices. If any device has
        an entry that is not finite, the whole tensor is NaN (in bfloat16 and float32, only the
        affected entries).

    Raises:
        TypeError: if a leaf is not floating, or the exchange is differentiated.
        ValueError: outside of shard_map, or for a format that cannot be sent, an unknown rounding,
            a missing key, a ``mu`` that is not positive, or a gradient that JAX already summed.

    Example:
        >>> from jax.sharding import PartitionSpec as P
        >>> from unitscale.parallel import make_mesh
        >>> mesh = make_mesh({"data": 1}, devices=jax.devices()[:1])
        >>> mean = jax.shard_map(
        ...     lambda g: all_reduce(g, "data", small=0),
        ...     mesh=mesh,
        ...     in_specs=P("data"),
        ...     out_specs=P(),
        ... )
        >>> print(mean(jnp.array([1.0, 1.05, -300.0])))
        [   1.    1. -288.]

    References:
        Peng et al., "FP8-LM: Training FP8 Large Language Models", 2023, arXiv 2310.18313,
        section 2.1 (one shared scale per tensor; here the sum is wide rather than FP8).
    """
    return exchange("all_reduce", grads, mu, axis_name, dtype, rounding, key, small, small_dtype)[0]


def reduce_scatter(
    grads: Any,
    axis_name: AxisName,
    dtype: Any = jnp.float8_e4m3fn,
    *,
    axis: int = 0,
    rounding: CastRounding = "nearest",
    key: jax.Array | None = None,
) -> Any:
    """Average gradients over a mesh axis; each device keeps its part (backward pass of FSDP).

    Scaling:
        Steps 1 and 2 of `all_reduce`: one rounding, and (n - 1) / n bytes per element.

    Args:
        grads: tree of floating arrays; no ScaledArrays.
        axis_name: mesh axis, or several axes that are treated as one.
        dtype: format of the exchange; float32 is `jax.lax.psum_scatter`.
        axis: dimension that is scattered, divisible by the number of devices.
        rounding: "nearest" or "stochastic".
        key: `jax.random` key for stochastic rounding.

    Returns:
        The tree of means in the input dtypes, each leaf's ``axis`` divided by the number of
        devices. If any device has an entry that is not finite, the whole tensor is NaN.

    Raises:
        TypeError: if a leaf is not floating or a ScaledArray, or the exchange is differentiated.
        ValueError: if the axis cannot be scattered, or for arguments that `all_reduce` rejects.
    """
    where = "reduce_scatter"
    devices, fmt = axis_size(where, axis_name), storage_of(f"parallel.{where}: dtype", dtype)
    if any(map(is_scaled, jax.tree.leaves(grads, is_leaf=is_scaled))):
        raise TypeError(
            f"unitscale.parallel.{where}: grads must be plain arrays, as a scale cannot be "
            "scattered; got a ScaledArray. Differentiate with respect to to_array(params)."
        )
    leaves, structure = _gradient_leaves(where, grads, axis_name)
    keys = _device_keys(where, rounding, key, axis_name, len(leaves))
    for leaf in leaves:
        if not -leaf.ndim <= axis < leaf.ndim or leaf.shape[axis] % devices:
            raise ValueError(
                f"unitscale.parallel.{where}: axis {axis} of every leaf must be divisible by the "
                f"{devices} devices of {axis_name!r}; got shape {leaf.shape}. Pad it, or use "
                "all_reduce."
            )
    shared = agree(leaves, [fmt] * len(leaves), [1.0] * len(leaves), axis_name)

    def mean(leaf: jax.Array, scale: _SharedScale, key: jax.Array | None) -> jax.Array:
        i = axis % leaf.ndim
        if _dtype(fmt).itemsize == 4:
            total = lax.psum_scatter(widen(leaf), axis_name, scatter_dimension=i, tiled=True)
            return narrow(total / devices, leaf.dtype)
        shape = (*leaf.shape[:i], devices, leaf.shape[i] // devices, *leaf.shape[i + 1 :])
        parts = jnp.moveaxis(leaf.reshape(shape), i, 0)
        own = _scatter_mean(parts, fmt, scale, axis_name, key)
        return _unscaled(own, scale[0], leaf.dtype)

    return jax.tree.unflatten(structure, list(map(mean, leaves, shared, keys)))


def all_gather(
    weights: Any,
    axis_name: AxisName,
    dtype: Any = jnp.float8_e4m3fn,
    *,
    axis: int = 0,
    rounding: CastRounding = "nearest",
    key: jax.Array | None = None,
) -> Any:
    """Gather whole weights from their parts, sending them in FP8 (forward pass of FSDP).

    Scaling:
        data = part / scale, rounded once and saturating. The scale is the smallest power of two
        that brings the largest magnitude of all parts into range. Weights that are already in
        ``dtype``, with the same power-of-two scale on all devices, arrive unchanged.

    It has no derivative: differentiate with respect to ``to_array`` of the result, and scatter the
    gradient with `reduce_scatter`.

    Args:
        weights: tree of floating arrays and of ScaledArrays with one scale: this device's parts.
        axis_name: mesh axis, or several axes that are treated as one.
        dtype: format of the exchange and of the result: float8, float16 or bfloat16.
        axis: dimension along which the parts are concatenated.
        rounding: "nearest" or "stochastic".
        key: `jax.random` key for stochastic rounding.

    Returns:
        The tree of whole weights, the same on all devices: ScaledArrays in ``dtype``. The scale is
        NaN if any part has an entry that is not finite.

    Raises:
        TypeError: if a leaf is not floating, or the exchange is differentiated.
        ValueError: for float32 (use `jax.lax.all_gather`), a leaf without ``axis``, or arguments
            that `all_reduce` rejects.

    References:
        Peng et al., "FP8-LM", 2023, arXiv 2310.18313, section 2.3 (weights of ZeRO in FP8).
    """
    where = "all_gather"
    axis_size(where, axis_name)
    fmt = storage_of(f"parallel.{where}: dtype", dtype)
    if _dtype(fmt).itemsize > 2:
        raise ValueError(
            f"unitscale.parallel.{where}: dtype must have at most 16 bits; got {fmt.name}. Use "
            "jax.lax.all_gather."
        )
    found, structure = jax.tree.flatten_with_path(weights, is_leaf=is_scaled)
    values = [jnp.asarray(leaf.value if is_scaled(leaf) else leaf) for _, leaf in found]
    for (path, _), value in zip(found, values, strict=True):
        name = f"weights{jax.tree_util.keystr(path)}"
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(
                f"unitscale.parallel.{where}: {name} must be floating or a ScaledArray; got dtype "
                f"{value.dtype}"
            )
        if not -value.ndim <= axis < value.ndim:
            raise ValueError(
                f"unitscale.parallel.{where}: {name} must have axis {axis}; got shape "
                f"{value.shape}. Keep small arrays whole on every device."
            )
    shared = agree(values, [fmt] * len(values), [1.0] * len(values), axis_name)
    keys = _device_keys(where, rounding, key, axis_name, len(values))

    def gather(value: jax.Array, scale: _SharedScale, key: jax.Array | None) -> ScaledArray:
        bits = encode(widen(value) * scale[1], fmt, key)
        return ScaledArray(_gather(bits, fmt, axis_name, axis % value.ndim), scale[0])

    return jax.tree.unflatten(structure, list(map(gather, values, shared, keys)))


@contextmanager
def exchange_gradients(dtype: Any) -> Iterator[None]:
    """Sum weight gradients over the mesh axis fsdp in FP8 or bfloat16, while a function is traced.

    The context applies to matmuls of `unitscale.ops` and `unitscale.quant` under `jax.jit`, on a
    mesh (`jax.set_mesh`) whose only axis of several devices is ``fsdp``. XLA sums all other
    gradients, and those of matrices that the axis does not divide evenly.

    Scaling:
        Each device rounds its partial sum to ``dtype`` (FP8 with a power-of-two scale of its own,
        as in `value_and_grad`), and sends each device the shard that this device keeps (an
        all-to-all). Shards are added in float32. In FP8, (n - 1) / n bytes are sent per entry.

    Args:
        dtype: "float8_e4m3fn", "float8_e5m2" or "bfloat16"; None or float32 for XLA's own sums.

    Raises:
        ValueError: for another format, or if the mesh has another axis of several devices.
    """
    fmt, sizes = gradients_format("parallel.exchange_gradients", dtype), auto_axes()
    if fmt is not None and set(sizes) - {"fsdp"}:
        raise ValueError(
            "unitscale.parallel.exchange_gradients: fsdp must be the only axis with several "
            f"devices; got {dict(sizes)}. Use dtype=None on this mesh."
        )
    with exchange_in(fmt):
        yield

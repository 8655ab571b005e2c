"""The one rule of every matrix product: data with data, and then the scales.

A product is emitted in the direct form that XLA turns into a single GEMM kernel: a dot_general of
the stored operands, then one multiplication by a factor and the operands' scales.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..core import (
    Scale,
    ScaledArray,
    bounded_product,
    narrow,
    result_dtype,
    to_float,
    wide_dtype,
    widen,
)
from ._quantize import dequantize

Factor = float | jax.Array
"""A number that is known while tracing, or one that XLA is to take for its own."""


def repeated_labels(*terms: str) -> list[str]:
    """Labels that stand twice in a term."""
    return [c for c in dict.fromkeys("".join(terms)) if any(term.count(c) > 1 for term in terms)]


def lone_labels(*terms: str) -> list[str]:
    """Labels that stand in one term only."""
    return [c for c in dict.fromkeys("".join(terms)) if sum(c in term for term in terms) < 2]


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A two-operand einsum in which every label stands in at least two of the three terms.

    Attributes:
        lhs: labels of the left operand's dimensions.
        rhs: labels of the right operand's dimensions.
        out: labels of the result's dimensions.

    Raises:
        ValueError: if a label stands in one term only, or twice in a term.

    Example:
        >>> Contraction("btk", "kn", "btn").grad_rhs
        Contraction(lhs='btk', rhs='btn', out='kn')
    """

    lhs: str
    rhs: str
    out: str

    def __post_init__(self) -> None:
        terms = self.lhs, self.rhs, self.out
        if wrong := (*repeated_labels(*terms), *lone_labels(*terms)):
            raise ValueError(
                "unitscale.quant.Contraction: every label must stand in at least two of the "
                f"three terms, once in each; got {wrong[0]!r} in {self.lhs},{self.rhs}->{self.out}"
            )

    @property
    def summed(self) -> str:
        """Labels that the product sums over, in the order of the left operand."""
        return "".join(c for c in self.lhs if c in self.rhs and c not in self.out)

    @property
    def grad_lhs(self) -> "Contraction":
        """Cotangent of the result with the right operand, giving the left gradient."""
        return Contraction(self.out, self.rhs, self.lhs)

    @property
    def grad_rhs(self) -> "Contraction":
        """Left operand with the cotangent of the result, giving the right gradient."""
        return Contraction(self.lhs, self.out, self.rhs)


def _accumulator(operand_dtype: Any, out_dtype: Any) -> Any:
    """The type that the product is asked for before the factor.

    bfloat16 has the range of float32, so the factor can follow the rounding, and XLA folds it into
    the GEMM. float16 has not: there the factor must be applied to the wide sum.
    """
    if out_dtype == jnp.bfloat16 and operand_dtype.itemsize <= 2:
        return out_dtype
    return max(wide_dtype(operand_dtype), wide_dtype(out_dtype), key=lambda wide: wide.itemsize)


def _alike(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Widens unequal operands to their promoted type; two 8-bit types multiply as they are."""
    if lhs.dtype == rhs.dtype or lhs.dtype.itemsize == rhs.dtype.itemsize == 1:
        return lhs, rhs
    dtype = result_dtype(lhs, rhs)
    return lhs.astype(dtype), rhs.astype(dtype)


def _multiply(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, accumulator: Any, sharding: Any
) -> jax.Array:
    def multiply(lhs: jax.Array, rhs: jax.Array, numbers: Any = dimension_numbers) -> jax.Array:
        return lax.dot_general(
            lhs, rhs, numbers, preferred_element_type=accumulator, out_sharding=sharding
        )

    def multiply_on_cpu(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return multiply(*_rows_together(widen(lhs), widen(rhs), dimension_numbers))

    # On the CPU, XLA has no kernel of bfloat16 into float32 for some layouts.
    widened = lhs.dtype == jnp.bfloat16 and accumulator == jnp.float32
    if widened or (lhs.dtype.itemsize >= 4 and _sums_rows(lhs, rhs, dimension_numbers)):
        return lax.platform_dependent(lhs, rhs, cpu=multiply_on_cpu, default=multiply)
    return multiply(lhs, rhs)


def _sums_rows(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any) -> bool:
    """Whether two operands are summed over the same first dimensions, two or more, on one device.

    As the gradient of a weight is, over batch and time. Where there are several devices each of
    these dimensions may be sharded over its own, which nothing tells while tracing.
    """
    (summed, other), (batch, _) = dimension_numbers
    rows = tuple(range(len(summed)))
    return jax.device_count() == 1 and len(rows) > 1 and not batch and summed == other == rows


def _rows_together(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any) -> Any:
    """Operands that are summed over one dimension in place of several, and its numbers.

    For several XLA's CPU backend transposes the left operand first, in as much time as the product
    takes. What is compiled for other platforms may be compiled for several of their devices.
    """
    if not _sums_rows(lhs, rhs, dimension_numbers):
        return lhs, rhs, dimension_numbers
    count = len(dimension_numbers[0][0])
    lhs, rhs = (x.reshape(-1, *x.shape[count:]) for x in (lhs, rhs))
    return lhs, rhs, (((0,), (0,)), ((), ()))


def _sharding_of_sum(lhs: jax.Array, rhs: jax.Array, spec: Contraction, out: list[str]) -> Any:
    """The sharding of dimensions ``out``, where explicit axes leave JAX in doubt of it.

    That is where what is summed over is sharded (its parts are added), or one mesh axis shards two
    dimensions (the first one keeps it). None where there is nothing to say.
    """
    places: dict[str, Any] = {}
    for x, labels in ((rhs, spec.rhs), (lhs, spec.lhs)):
        places.update(zip(labels, jax.typeof(x).sharding.spec, strict=True))
    used: set[str] = set()
    kept = []
    for place in (places[c] for c in out):
        names = place if isinstance(place, tuple) else (place,) if place is not None else ()
        kept.append(None if used & set(names) else place)
        used |= set(names)
    if kept == [places[c] for c in out] and all(places[c] is None for c in spec.summed):
        return None
    return NamedSharding(jax.typeof(lhs).sharding.mesh, PartitionSpec(*kept))


def placed_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns an array with the sharding of another, where its axes are explicit.

    What was made under no mesh, such as a parameter, lies whole on all devices of this one.
    """
    own, wanted = (jax.typeof(array).sharding for array in (x, like))
    if own.spec == wanted.spec:
        return x
    mesh = own.mesh if wanted.mesh.empty else wanted.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, wanted.spec))


def _dot(lhs: jax.Array, rhs: jax.Array, spec: Contraction, out_dtype: Any) -> jax.Array:
    """The bare sum of products, with dimensions in the order of ``spec.out``."""
    batch = [c for c in spec.lhs if c in spec.rhs and c in spec.out]
    positions = [
        tuple(map(labels.index, group))
        for group in (spec.summed, batch)
        for labels in (spec.lhs, spec.rhs)
    ]
    dimension_numbers = ((positions[0], positions[1]), (positions[2], positions[3]))
    lhs, rhs = _alike(lhs, rhs)
    accumulator = _accumulator(result_dtype(lhs, rhs), out_dtype)
    known = (*batch, *spec.summed)
    free = [c for labels in (spec.lhs, spec.rhs) for c in labels if c not in known]
    sharding = _sharding_of_sum(lhs, rhs, spec, batch + free)
    y = _multiply(lhs, rhs, dimension_numbers, accumulator, sharding)
    order = [(batch + free).index(c) for c in spec.out]
    return y if order == sorted(order) else lax.transpose(y, order)


def data_of(x: jax.Array | ScaledArray) -> jax.Array:
    """What is multiplied of an operand."""
    return x.data if isinstance(x, ScaledArray) else x


def in_result(scale: Scale, labels: str, out: str) -> Scale:
    """Returns the scale of an operand in a shape that broadcasts against dimensions ``out``.

    Example:
        >>> in_result(jnp.ones((3, 1)), "bk", "nb").shape
        (1, 3)
    """
    if scale is None or scale.ndim == 0:
        return scale
    kept = [axis for axis, c in enumerate(labels) if c in out]
    squeezed = lax.squeeze(scale, [axis for axis in range(scale.ndim) if axis not in kept])
    own = "".join(labels[axis] for axis in kept)
    ordered = sorted(own, key=out.index)
    scale = lax.transpose(squeezed, [own.index(c) for c in ordered])
    return lax.expand_dims(scale, [axis for axis, c in enumerate(out) if c not in own])


def _separate(x: jax.Array | ScaledArray, labels: str, spec: Contraction) -> tuple[Any, Scale]:
    """Data and the scale that can be applied to the result; scales that cannot go into the data."""
    if x.ndim != len(labels):
        raise ValueError(
            f"unitscale.quant.product: an operand {labels!r} must have {len(labels)} dimensions; "
            f"got shape {tuple(x.shape)}. Reshape it, or give it other labels."
        )
    if not isinstance(x, ScaledArray):
        return x, None
    scale = x.scale
    if scale is None:
        return x.data, None
    summed = [axis for axis, c in enumerate(labels) if c in spec.summed]
    if x.block_shape or (scale.ndim and any(scale.shape[axis] > 1 for axis in summed)):
        return dequantize(x), None
    return x.data, in_result(to_float(scale), labels, spec.out)


def product(
    lhs: jax.Array | ScaledArray,
    rhs: jax.Array | ScaledArray,
    spec: Contraction,
    factor: Factor,
    out_dtype: Any,
) -> jax.Array:
    """Returns ``factor * einsum(lhs, rhs)`` in ``out_dtype``, accumulated in float32.

    Scaling:
        dot(lhs.data, rhs.data) * (factor * lhs.scale * rhs.scale). Scales that vary along a
        dimension that is summed over, as those of blocks do, go into the data before the product.
        For float16 and float32 results the multiplication is that of the float32 sum, which is
        rounded once; for bfloat16 results that of the rounded sum (see `contract`). Where the
        product of scales and factor is below 2^-126 the result is 0, though data may be large.

    Raises:
        ValueError: if an operand has not one dimension per label.

    Example:
        >>> x = jnp.ones((2, 4), jnp.float8_e4m3fn)
        >>> print(product(x, x.T, Contraction("ik", "kj", "ij"), 0.5, jnp.float16))
        [[2. 2.]
         [2. 2.]]
        >>> print(product(ScaledArray(x, 8.0), x.T, Contraction("ik", "kj", "ij"), 0.5, "float32"))
        [[16. 16.]
         [16. 16.]]

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433, section 3.
    """
    lhs_data, lhs_scale = _separate(lhs, spec.lhs, spec)
    rhs_data, rhs_scale = _separate(rhs, spec.rhs, spec)
    y = _dot(lhs_data, rhs_data, spec, jnp.dtype(out_dtype))
    scale, rest = bounded_product(lhs_scale, rhs_scale)
    if scale is None:
        if isinstance(factor, jax.Array):
            return narrow(y * factor.astype(y.dtype), out_dtype)
        return narrow(y if factor == 1 else y * factor, out_dtype)
    # In this order only what ends out of float32's range leaves it. Infinity would make NaN of a
    # zero; beyond it only products that overflow anyway.
    most = min(float(jnp.finfo(dtype).max) for dtype in (y.dtype, jnp.float32))
    scale = jnp.minimum(to_float(scale) * factor * rest, most)
    return narrow(y * scale.astype(y.dtype), out_dtype)

"""Quantized matmuls: `Core` quantizes, multiplies and differentiates.

`contract` runs it on whole operands, `Multiplier` on chunks of the left one, and `grouped` with a
matrix per group of rows. `dot_general` and `einsum` fit the hooks of layer libraries.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from string import ascii_lowercase, ascii_uppercase
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..core import (
    Scale,
    ScaledArray,
    cast,
    constrain_sharding,
    custom_vjp,
    dithered,
    format_of,
    is_scaled,
    narrow,
    reshard,
    result_dtype,
    to_float,
    wide_dtype,
    widen,
)
from . import _lowering
from ._config import Block, Dynamic, MatmulConfig, Static
from ._lowering import data_of
from ._quantize import at_scale, dequantize, needs_scale, quantize_array, tensor_scale, values_of
from ._state import QuantState, Seen, check_state, measure, state_gradient, watched

LHS, RHS, COTANGENT = 0, 1, 2  # rows of a QuantState


def _wrong_label(*terms: str) -> str:
    """A label that is in one term only, or twice in a term; "" if there is none."""
    counts = {c: [term.count(c) for term in terms] for c in "".join(terms)}
    return next((c for c, n in counts.items() if max(n) > 1 or sum(n) < 2), "")


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A two-operand einsum in which every label is in at least two of the three terms.

    Attributes:
        lhs, rhs, out: one letter for each dimension.

    Raises:
        ValueError: if a label is in one term only, or twice in a term.

    Example:
        >>> Contraction("btk", "kn", "btn").grad_rhs
        Contraction(lhs='btk', rhs='btn', out='kn')
    """

    lhs: str
    rhs: str
    out: str

    def __post_init__(self) -> None:
        terms = self.lhs, self.rhs, self.out
        if wrong := _wrong_label(*terms):
            raise ValueError(
                "unitscale.quant.Contraction: every label must be in at least two of the three "
                f"terms, once in each; got {wrong!r} in {self.lhs},{self.rhs}->{self.out}"
            )

    @property
    def summed(self) -> str:
        """Labels that the matmul sums over, in the order of the left operand."""
        return "".join(c for c in self.lhs if c in self.rhs and c not in self.out)

    @property
    def grad_lhs(self) -> "Contraction":
        """Cotangent of the result with the right operand, giving the left gradient."""
        return Contraction(self.out, self.rhs, self.lhs)

    @property
    def grad_rhs(self) -> "Contraction":
        """Left operand with the cotangent of the result, giving the right gradient."""
        return Contraction(self.lhs, self.out, self.rhs)


def _scale_in_result(scale: Scale, labels: str, out: str) -> Scale:
    """Reshape the scale of an operand so that it broadcasts against dimensions ``out``."""
    if scale is None or scale.ndim == 0:
        return scale
    kept = [axis for axis, c in enumerate(labels) if c in out]
    squeezed = lax.squeeze(scale, [axis for axis in range(scale.ndim) if axis not in kept])
    order = sorted(range(len(kept)), key=lambda i: out.index(labels[kept[i]]))
    new = [axis for axis, c in enumerate(out) if c not in labels]
    return lax.expand_dims(lax.transpose(squeezed, order), new)


def _data_and_scale(x: Any, labels: str, spec: Contraction) -> tuple[jax.Array, Scale]:
    """The data to multiply and the scale of the result; scales along the sum go into the data."""
    if x.ndim != len(labels):
        raise ValueError(
            f"unitscale.quant.product: an operand {labels!r} must have {len(labels)} dimensions; "
            f"got shape {tuple(x.shape)}. Reshape it, or give it other labels."
        )
    scale = x.scale if is_scaled(x) else None
    if scale is None:
        return data_of(x), None
    summed = [axis for axis, c in enumerate(labels) if c in spec.summed]
    if x.block_shape or (scale.ndim and any(scale.shape[axis] > 1 for axis in summed)):
        return dequantize(x), None
    return x.data, _scale_in_result(to_float(scale), labels, spec.out)


def product(
    lhs: jax.Array | ScaledArray,
    rhs: jax.Array | ScaledArray,
    spec: Contraction,
    factor: float | jax.Array,
    out_dtype: Any,
) -> jax.Array:
    """Return ``factor * einsum(lhs, rhs)`` in ``out_dtype``, accumulated in float32.

    Scaling:
        dot(lhs.data, rhs.data) * (factor * lhs.scale * rhs.scale): one dot and one multiply, which
        XLA compiles to a single GEMM kernel. Scales that vary along a summed dimension, as those
        of blocks do, multiply the data before the dot. float16 and float32 results are multiplied
        in the accumulator and rounded once; bfloat16 results are multiplied after rounding. If
        scales and factor multiply to less than 2^-126, the result is 0.

    Raises:
        ValueError: if an operand does not have one dimension per label.

    References:
        As `contract`.
    """
    out_dtype = jnp.dtype(out_dtype)
    (left, left_scale), (right, right_scale) = (
        _data_and_scale(x, labels, spec) for x, labels in ((lhs, spec.lhs), (rhs, spec.rhs))
    )
    dtype = result_dtype(left, right)
    if left.dtype != right.dtype and max(left.dtype.itemsize, right.dtype.itemsize) > 1:
        left, right = left.astype(dtype), right.astype(dtype)  # two 8-bit types stay as they are
    accumulator = out_dtype
    if out_dtype != jnp.bfloat16 or dtype.itemsize > 2:
        # bfloat16 has float32's range, so its factor can follow the rounding and XLA folds it into
        # the GEMM; in float16 the factor has to multiply the wide sum.
        wide = wide_dtype(dtype), wide_dtype(out_dtype)
        accumulator = max(wide, key=lambda dtype: dtype.itemsize)

    batch = [c for c in spec.lhs if c in spec.rhs and c in spec.out]
    free = [c for labels in (spec.lhs, spec.rhs) for c in labels if c not in (*batch, *spec.summed)]
    numbers = tuple(
        tuple(tuple(map(labels.index, group)) for labels in (spec.lhs, spec.rhs))
        for group in (spec.summed, batch)
    )
    sharding = _lowering.sharding_of_sum(left, right, spec, batch + free)
    y = _lowering.dot(left, right, numbers, accumulator, sharding)
    order = [(batch + free).index(c) for c in spec.out]
    y = y if order == sorted(order) else lax.transpose(y, order)

    scales = [scale for scale in (left_scale, right_scale) if scale is not None]
    if not scales and not isinstance(factor, jax.Array):
        return narrow(y if factor == 1 else y * factor, out_dtype)
    total: Any = factor
    if len(scales) == 2:
        # Smallest times largest first: only a result out of float32's range leaves it.
        a, b = scales
        low, high = jnp.minimum(a, b), jnp.maximum(a, b)
        middle = jnp.maximum(low, jnp.minimum(high, factor))
        total = jnp.minimum(low, factor) * jnp.maximum(high, factor) * middle
    elif scales:
        total = scales[0] * factor
    if scales:  # Infinity would make NaN of a zero.
        largest = min(float(jnp.finfo(dtype).max) for dtype in (y.dtype, jnp.float32))
        total = jnp.minimum(total, largest)
    return narrow(y * total.astype(y.dtype), out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _cast(x, dtype):  # `unitscale.analysis` recognizes casts by this name
    return narrow(x, dtype)


def _refuse(x, dtype):
    raise TypeError(
        "unitscale.quant: an FP8 matmul has no second derivative, because cotangents of its 8-bit "
        "operands would be 8-bit numbers without a scale. Differentiate twice (gradient penalties, "
        "forces, Hessians) through layers in 16 or 32 bits: policy='bfloat16', or leave them out "
        "of nn.convert."
    )


_cast.defvjp(_refuse, _refuse)


def _cast_operand(x: jax.Array, dtype: Any) -> jax.Array:
    """Cast inside a matmul's rule; reject second derivatives through casts to 8 bits."""
    fmt = format_of(dtype)
    return _cast(x, dtype) if fmt.dtype is not None and fmt.dtype.itemsize == 1 else cast(x, dtype)


def quantize_operand(
    x: jax.Array,
    which: int,
    axes: tuple[int, ...],
    config: MatmulConfig | None,
    state: QuantState | None,
) -> tuple[Any, Seen | None]:
    """Quantize tensor ``which`` of a matmul that sums over ``axes``; measure it for the state."""
    if config is None:
        return x, None
    dtype = (config.lhs, config.rhs, config.cotangent)[which]
    if config.dither and which == COTANGENT:
        x = dithered(x, format_of(dtype).mantissa_bits)
    if state is not None:
        if not needs_scale(dtype):
            return at_scale(x, dtype, 1, _cast_operand), None
        fmt = format_of(dtype)
        scale = state.scale[which]
        if state.calibrating:
            scale = tensor_scale(x, fmt, state.strategy.margin)
        return at_scale(x, dtype, scale, _cast_operand), measure(x, fmt, scale)
    if isinstance(config.strategy, Static):
        return at_scale(x, dtype, config.strategy.scales[which], _cast_operand), None
    axes = tuple(sorted(axis % x.ndim for axis in axes))
    return quantize_array(x, dtype, config.strategy, axes, _cast_operand), None


@dataclasses.dataclass(frozen=True)
class Core:
    """The static part of a matmul, and its three steps: quantize, multiply, differentiate."""

    spec: Contraction
    factors: tuple[float, ...]
    config: MatmulConfig | None
    out_dtype: Any
    dtypes: tuple[Any, Any]  # of the two gradients

    @property
    def per_slice(self) -> bool:
        """Whether scales differ along dimensions, so that each matmul has its own cotangent."""
        strategy = None if self.config is None else self.config.strategy
        return isinstance(strategy, Block) or (
            isinstance(strategy, Dynamic) and strategy.granularity == "channel"
        )

    def quantize(
        self, x: jax.Array, which: int, state: QuantState | None, spec: Contraction | None = None
    ) -> tuple[Any, Seen | None]:
        """Quantize a tensor for the matmul ``spec``, by default the forward one."""
        spec = spec or self.spec
        labels = (spec.lhs, spec.rhs, self.spec.out)[which]
        # Axes are counted from the end: grouped matrices have a leading dimension without a label.
        axes = tuple(axis - len(labels) for axis, c in enumerate(labels) if c in spec.summed)
        return quantize_operand(x, which, axes, self.config, state)

    def multiply(
        self, lhs: Any, rhs: Any, sizes: Any, spec: Contraction, factor: Any, dtype: Any
    ) -> jax.Array:
        """The forward matmul, or that of the left gradient; ``sizes`` are those of groups."""
        del sizes
        return product(lhs, rhs, spec, factor, dtype)

    def right_gradient(
        self, lhs: Any, cotangent: Any, sizes: Any, factor: Any, dtype: Any
    ) -> jax.Array:
        """The matmul of the right gradient."""
        del sizes
        spec = self.spec.grad_rhs
        n = len(spec.summed)

        def run(lhs: Any, cotangent: Any, rows_last: bool) -> jax.Array:
            left, right = ((x[n:] + x[:n]) if rows_last else x for x in (spec.lhs, spec.rhs))
            return product(lhs, cotangent, Contraction(left, right, spec.out), factor, dtype)

        rows_lead = spec.lhs[:n] == spec.rhs[:n] == spec.summed
        return _lowering.fp8_weight_gradient(run, lhs, cotangent, n if rows_lead else 0)

    def differentiate(
        self,
        lhs: Any,
        rhs: Any,
        cotangent: jax.Array,
        sizes: Any,
        factors: tuple[Any, ...],
        state: QuantState | None,
        dtypes: tuple[Any, Any],
        transposed: ScaledArray | None = None,  # the right operand, with dimensions reversed
    ) -> tuple[jax.Array, jax.Array, Seen | None]:
        """Return the gradients of the operands, and statistics of the cotangent."""
        spec, seen, like = self.spec, None, (data_of(lhs), data_of(rhs))
        if self.per_slice:
            for_lhs, rhs = _move_scale(cotangent, spec.out, rhs, spec.rhs)
            for_rhs, lhs = _move_scale(cotangent, spec.out, lhs, spec.lhs)
            for_lhs, _ = self.quantize(for_lhs, COTANGENT, state, spec.grad_lhs)
            for_rhs, _ = self.quantize(for_rhs, COTANGENT, state, spec.grad_rhs)
        else:
            for_lhs, seen = self.quantize(cotangent, COTANGENT, state)
            for_rhs = for_lhs
        left = spec.grad_lhs
        if transposed is not None:
            rhs, left = transposed, Contraction(spec.out, spec.rhs[::-1], spec.lhs)
        grad_lhs = self.multiply(for_lhs, rhs, sizes, left, factors[1], dtypes[0])
        grad_rhs = self.right_gradient(lhs, for_rhs, sizes, factors[2], dtypes[1])
        reshard_like = _lowering.reshard_like
        return reshard_like(grad_lhs, like[0]), reshard_like(grad_rhs, like[1]), seen


def _move_scale(cotangent: Any, out: str, operand: Any, labels: str) -> tuple[Any, Any]:
    """Move the scale of an operand along the cotangent's dimensions into the cotangent.

    A backward matmul sums over these dimensions, so that the scale cannot multiply its result.
    """
    if not is_scaled(operand) or operand.block_shape:
        return cotangent, operand
    scale = to_float(_scale_in_result(operand.scale, labels, out))
    return widen(cotangent) * scale, operand.data


@partial(custom_vjp, nondiff_argnums=(5,))
def _matmul(lhs, rhs, sizes, multiplier, state, core):
    return _matmul_fwd(lhs, rhs, sizes, multiplier, state, core)[0]


def _matmul_fwd(lhs, rhs, sizes, multiplier, state, core):
    lhs, saw_lhs = core.quantize(lhs, LHS, state)
    rhs, saw_rhs = core.quantize(rhs, RHS, state)
    factors = core.factors
    if multiplier is not None:
        factors = tuple(factor * multiplier for factor in factors)
    own_lhs, own_rhs = lhs, rhs
    if core.config is not None and sizes is None:  # matmuls in different loops are not merged
        own_lhs, own_rhs, factors = _lowering.isolate(lhs, rhs, factors)
    y = core.multiply(own_lhs, rhs, sizes, core.spec, factors[0], core.out_dtype)
    own = {i: f for i, f in enumerate(factors) if i and isinstance(f, jax.Array)}
    no_gradient = jax.tree.map(jnp.zeros_like, multiplier)
    return y, (lhs, own_rhs, sizes, no_gradient, state, (saw_lhs, saw_rhs), own)


def _matmul_bwd(core, residuals, cotangent):
    lhs, rhs, sizes, no_gradient, state, seen, own = residuals
    factors = tuple(own.get(i, f) for i, f in enumerate(core.factors))
    grad_lhs, grad_rhs, saw = core.differentiate(
        lhs, rhs, cotangent, sizes, factors, state, core.dtypes
    )
    if state is not None:
        state = state_gradient(state, (*seen, saw), (lhs.size, rhs.size, cotangent.size))
    return grad_lhs, grad_rhs, None, no_gradient, state


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def run_core(
    owner: str,
    core: type[Core],
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array | None,
    spec: Contraction,
    factors: tuple[float, ...],
    config: MatmulConfig | None,
    out_dtype: Any,
    state: QuantState | None,
    multiplier: jax.Array | None = None,
) -> jax.Array:
    """Check the arguments of `contract` or `grouped` and run the core."""
    check_state(owner, config, state)
    if out_dtype is None:
        out_dtype = result_dtype(lhs, rhs) if config is None else result_dtype(lhs)
    lhs, rhs = watched((lhs, rhs), state)
    factors, dtypes = tuple(map(float, factors)), (lhs.dtype, rhs.dtype)
    static = core(spec, factors, config, jnp.dtype(out_dtype), dtypes)
    return _matmul(lhs, rhs, sizes, multiplier, state, static)


def contract(
    lhs: jax.Array,
    rhs: jax.Array,
    spec: Contraction,
    *,
    factors: tuple[float, ...] = (1.0, 1.0, 1.0),
    config: MatmulConfig | None = None,
    out_dtype: Any = None,
    state: QuantState | None = None,
    multiplier: jax.Array | None = None,
) -> jax.Array:
    """Contract two arrays with static forward and backward factors.

    Scaling:
        out = fwd * einsum(q(lhs), q(rhs)), dlhs = bwd_lhs * einsum(q(dout), q(rhs)),
        drhs = bwd_rhs * einsum(q(lhs), q(dout)), where q divides by the scale of the strategy of
        ``config`` and casts with saturation, and the scales multiply the result as in `product`.

        Each tensor is quantized once, and quantized operands are saved for the backward pass. With
        channel or block scales, which differ in each matmul, the cotangent is quantized for each of
        its two, times the channel scales of the saved operand, and saved blocks are dequantized.

    Args:
        lhs: floating, with dimensions ``spec.lhs``.
        rhs: floating, with dimensions ``spec.rhs``.
        spec: the contraction.
        factors: static (fwd, bwd_lhs, bwd_rhs).
        config: formats and strategy; None multiplies the operands in their promoted dtype.
        out_dtype: dtype of the result; by default that of lhs when quantized, else the promoted
            one, 8-bit types counting as bfloat16. Each gradient has the dtype of its operand.
        state: the scales of `Delayed`, or of `Static` without scales. Its gradient holds the amax
            statistics of the three tensors, for `QuantState.advance`.
        multiplier: scalar array, such as an operand's scale, that multiplies the results of all
            three matmuls. Its own gradient is zero.

    Returns:
        Array with dimensions ``spec.out``.

    Raises:
        ValueError: if the strategy needs a state and has none, or the state of another strategy.

    Example:
        >>> x, w = jnp.ones((2, 8)), jnp.ones((8, 3))
        >>> spec = Contraction("bk", "kn", "bn")
        >>> print(contract(x, w, spec, config=MatmulConfig())[0])
        [8. 8. 8.]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (matmul).
    """
    return run_core(
        "contract", Core, lhs, rhs, None, spec, factors, config, out_dtype, state, multiplier
    )


class Part(NamedTuple):
    """A chunk of the left operand as it was multiplied, and its statistics for the state."""

    lhs: Any
    seen: Seen | None
    dtype: Any


class Multiplier:
    """Chunked matmul: multiply chunks of a left operand by one right operand, quantized once.

    For ops such as `ops.readout_cross_entropy`, which have their own differentiation rule and never
    materialize the whole result. It is not differentiable.

    Scaling:
        As `contract`; statistics of the left operand and the cotangent are those of a chunk.

    Args:
        rhs: right operand, floating.
        spec: the contraction of a chunk.
        factors: forward factor and those of both gradients, as for `contract`.
        config: formats and strategies, as for `contract`.
        out_dtype: dtype of the results.
        state: statistics, as for `contract`.
        parts: number of chunks. If more than one, gradients of the right operand are float32 or
            wider, so that they can be summed.
        places: mesh axes for labels of the right operand, as for `core.constrain_sharding`. The
            operand is resharded after quantizing.
        forward: dtype of both operands in the forward matmul; ``config`` then applies to the
            gradients alone. None for the formats of ``config``.

    Example:
        >>> spec = Contraction("bk", "kn", "bn")
        >>> times = Multiplier(jnp.ones((8, 3)), spec, (1.0, 1.0, 0.5), None, "float32", 1)
        >>> y, part = times(jnp.ones((2, 8)))
        >>> dx, dw, _ = times.gradients(part, y)
        >>> print(y[0], dx[0, 0], dw[0])
        [8. 8. 8.] 24.0 [8. 8. 8.]

    References:
        As `contract`.
    """

    def __init__(
        self,
        rhs: jax.Array,
        spec: Contraction,
        factors: tuple[float, float, float],
        config: MatmulConfig | None,
        out_dtype: Any,
        parts: int,
        state: QuantState | None = None,
        places: Mapping[str, Sequence[str]] | None = None,
        forward: Any = None,
    ) -> None:
        check_state("Multiplier", config, state)
        gradient = rhs.dtype if parts == 1 else wide_dtype(rhs.dtype)
        self._core = Core(spec, factors, config, out_dtype, (None, gradient))
        self._state, self._forward = state, forward

        def constrain(data: jax.Array) -> jax.Array:
            return constrain_sharding(data, *((places or {}).get(label) for label in spec.rhs))

        quantized, self._seen = self._core.quantize(rhs, RHS, state)
        self._rhs = quantized.map_data(constrain) if is_scaled(quantized) else constrain(quantized)
        self._right = self._rhs if forward is None else constrain(cast(rhs, forward))
        self._transposed = _lowering.transposed_copy(self._rhs) if parts > 1 else None

    def __call__(self, lhs: jax.Array) -> tuple[jax.Array, Part]:
        """Multiply a chunk; return the result and the argument of `gradients`."""
        core = self._core
        quantized, seen = core.quantize(lhs, LHS, self._state)
        left = quantized if self._forward is None else cast(lhs, self._forward)
        y = product(left, self._right, core.spec, core.factors[0], core.out_dtype)
        return y, Part(quantized, seen, lhs.dtype)

    def gradients(
        self, part: Part, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, QuantState | None]:
        """Return the gradients of the chunk, the right operand and the state.

        Sum the last two over all chunks, and add `shared_gradient` to that of the state.
        """
        core, state, dtypes = self._core, self._state, (part.dtype, self._core.dtypes[1])
        left, right, saw = core.differentiate(
            part.lhs, self._rhs, cotangent, None, core.factors, state, dtypes, self._transposed
        )
        if state is not None:
            sizes = part.lhs.size, 0, cotangent.size
            state = state_gradient(state, (part.seen, None, saw), sizes)
        return left, right, state

    @property
    def shared_gradient(self) -> QuantState | None:
        """The right operand's part of the state's gradient."""
        seen, sizes = (None, self._seen, None), (0, self._rhs.size, 0)
        return None if self._state is None else state_gradient(self._state, seen, sizes)


@partial(custom_vjp, nondiff_argnums=(3, 4))
def _fake(lhs, rhs, state, config, axes):
    return _fake_fwd(lhs, rhs, state, config, axes)[0]


def _fake_fwd(lhs, rhs, state, config, axes):
    q_lhs, saw_lhs = quantize_operand(lhs, LHS, axes[0], config, state)
    q_rhs, saw_rhs = quantize_operand(rhs, RHS, axes[1], config, state)
    values = values_of(q_lhs, lhs), values_of(q_rhs, rhs)
    return values, (state, (saw_lhs, saw_rhs, None), (lhs.size, rhs.size, 0))


def _fake_bwd(config, axes, residuals, cotangents):
    state, seen, sizes = residuals
    return *cotangents, None if state is None else state_gradient(state, seen, sizes)


_fake.defvjp(_fake_fwd, _fake_bwd)


def fake_quantize_operands(
    lhs: jax.Array,
    rhs: jax.Array,
    config: MatmulConfig,
    *,
    axes: tuple[tuple[int, ...], tuple[int, ...]] = ((-1,), (-2,)),
    state: QuantState | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Round both operands to the formats of ``config``, for ops that XLA cannot run in FP8.

    The operands keep their dtypes, and cotangents are not rounded. ``config`` and ``state`` are as
    for `contract`; ``axes`` are the summed dimensions of each operand.
    """
    check_state("fake_quantize_operands", config, state)
    lhs, rhs = watched((lhs, rhs), state)
    return _fake(lhs, rhs, state, config, axes)


def contraction_of(dimension_numbers: Any, lhs_rank: int, rhs_rank: int) -> Contraction:
    """Return the `Contraction` of `lax.dot_general`'s dimension numbers.

    Example:
        >>> contraction_of((((1,), (0,)), ((), ())), 2, 2)
        Contraction(lhs='ab', rhs='bc', out='ac')
    """
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = dimension_numbers
    lhs = ascii_lowercase[:lhs_rank]
    pairs = zip((*rhs_batch, *rhs_summed), (*lhs_batch, *lhs_summed), strict=True)
    shared = {right: lhs[left] for right, left in pairs}
    fresh = iter(ascii_lowercase[lhs_rank:])
    rhs = "".join(shared.get(axis) or next(fresh) for axis in range(rhs_rank))
    batch = "".join(lhs[axis] for axis in lhs_batch)
    free = [c for c in lhs if c not in rhs] + [c for c in rhs if c not in lhs]
    return Contraction(lhs, rhs, batch + "".join(free))


def einsum_problem(subscripts: str) -> str:
    """Return why an einsum is not one matmul of two operands; "" if it is one.

    Example:
        >>> einsum_problem("ab,bc->a")
        "its einsum_str has 'c' in one term only"
    """
    terms, arrow, out = subscripts.replace(" ", "").partition("->")
    lhs, _, rhs = terms.partition(",")
    labels = [term.replace("...", "") for term in (lhs, rhs, out)]
    if not arrow or "..." in rhs or ("..." in lhs) != ("..." in out):
        return "its einsum_str has no ->, or an ellipsis that is not of the input and the result"
    if not (wrong := _wrong_label(*labels)):
        return ""
    if "".join(labels).count(wrong) > 1:
        return "its einsum_str repeats a label"
    return f"its einsum_str has {wrong!r} in one term only"


def einsum_contraction(subscripts: str, lhs_rank: int) -> Contraction:
    """Return the contraction of an einsum without `einsum_problem`, its ellipsis as labels.

    Example:
        >>> einsum_contraction("...k,kn->...n", 2)
        Contraction(lhs='Ak', rhs='kn', out='An')
    """
    terms, _, out = subscripts.replace(" ", "").partition("->")
    lhs, rhs = terms.split(",")
    spare = "".join(c for c in ascii_uppercase if c not in subscripts)
    hidden = spare[: lhs_rank - len(lhs.replace("...", ""))]
    return Contraction(lhs.replace("...", hidden), rhs, out.replace("...", hidden))


def multiply(
    lhs: jax.Array,
    rhs: jax.Array,
    spec: Contraction,
    config: MatmulConfig,
    state: QuantState | None = None,
    *,
    out_dtype: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Call `contract` with all factors 1, for the hooks of layer libraries."""
    out_dtype = result_dtype(lhs, rhs) if out_dtype is None else out_dtype
    y = contract(lhs, rhs, spec, config=config, out_dtype=out_dtype, state=state)
    return reshard(y, out_sharding)


def dot_general(config: MatmulConfig, state: QuantState | None = None) -> Callable[..., jax.Array]:
    """Return a `lax.dot_general` with quantized operands and cotangents.

    For the ``dot_general=`` of `flax.nnx.Linear`, `flax.linen.Dense` and other layers. Stateful
    strategies need a ``state`` here, or `nn.DotGeneral`.

    Scaling:
        As `contract` with all factors 1. ``precision`` is ignored, integers are not quantized, and
        the result has the preferred dtype or that to which the operands promote.

    Example:
        >>> dot = dot_general(MatmulConfig(cotangent="e5m2"))
        >>> print(dot(jnp.ones((2, 8)), jnp.ones((8, 3)), (((1,), (0,)), ((), ())))[0])
        [8. 8. 8.]
    """
    check_state("dot_general", config, state)

    def dot(
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
        dtype = preferred_element_type
        if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (lhs, rhs)):
            return lax.dot_general(
                lhs, rhs, dimension_numbers, precision, dtype, out_sharding=out_sharding
            )
        spec = contraction_of(dimension_numbers, lhs.ndim, rhs.ndim)
        return multiply(lhs, rhs, spec, config, state, out_dtype=dtype, out_sharding=out_sharding)

    return dot


def einsum(config: MatmulConfig, state: QuantState | None = None) -> Callable[..., jax.Array]:
    """Return a `jnp.einsum` with quantized matmuls, for `flax.nnx.Einsum(einsum_op=)`.

    An einsum that is one matmul of two operands keeps them in their order. Any other runs through
    `jnp.einsum`, which may exchange operands: then both must have one format and static scale.

    Example:
        >>> print(einsum(MatmulConfig())("ij,jk->ki", jnp.ones((2, 8)), jnp.ones((8, 3)))[0])
        [8. 8.]
    """
    dot = dot_general(config, state)

    def op(subscripts: Any, *operands: Any, out_sharding: Any = None, **options: Any) -> jax.Array:
        arrays = [jnp.asarray(x) for x in operands]
        if (spec := _one_matmul(subscripts, arrays)) is not None:
            lhs, rhs = arrays
            dtype = options.get("preferred_element_type")
            return multiply(
                lhs, rhs, spec, config, state, out_dtype=dtype, out_sharding=out_sharding
            )
        scales = config.strategy.scales if isinstance(config.strategy, Static) else None
        if config.lhs != config.rhs or (scales is not None and scales[0] != scales[1]):
            raise ValueError(
                f"unitscale.quant.einsum: both operands of {subscripts!r}, which is not one matmul "
                "of two operands, must have one format and static scale, because jnp.einsum may "
                f"exchange them; got {config}. Use dot_general."
            )
        outside = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]

        def inner(*operands: Any, **options: Any) -> jax.Array:
            with jax.disable_jit(outside):
                return dot(*operands, **options)

        # jnp.einsum jits itself for each `_dot_general`, which its cache would hold forever, with
        # the state, and compile for in every call of `einsum`. So it runs here as plain Python.
        with jax.disable_jit():
            return jnp.einsum(
                subscripts, *operands, out_sharding=out_sharding, _dot_general=inner, **options
            )

    return op


def _one_matmul(subscripts: Any, operands: list[jax.Array]) -> Contraction | None:
    """The contraction of an einsum of two floating arrays; None if it is not one or broadcasts."""
    floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
    if not (isinstance(subscripts, str) and len(operands) == 2 and floating):
        return None
    if einsum_problem(subscripts):
        return None
    lhs, rhs = operands
    spec = einsum_contraction(subscripts, lhs.ndim)
    sizes = dict(zip(spec.lhs, lhs.shape, strict=False))
    # `jnp.einsum` takes a dimension of 1 for one of any size.
    broadcast = any(sizes.get(c, n) != n for c, n in zip(spec.rhs, rhs.shape, strict=False))
    return None if broadcast else spec

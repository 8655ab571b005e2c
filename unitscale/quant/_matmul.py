"""Quantized matmuls: `Core` quantizes, multiplies and differentiates.

`contract` applies it to whole operands, `Multiplier` to chunks of the left operand, and `grouped`
to groups of rows with a matrix each.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import (
    ScaledArray,
    cast,
    constrain_sharding,
    custom_vjp,
    dithered,
    format_of,
    fsdp_devices,
    is_float8,
    is_scaled,
    narrow,
    parts_to_exchange,
    reshard_bits,
    result_dtype,
    sum_parts,
    to_float,
    weight_gradient_dtype,
    wide_dtype,
    widen,
)
from . import _lowering
from ._config import Block, Dynamic, MatmulConfig, Static, Unit
from ._lowering import Moved
from ._quantize import (
    dequantize,
    hadamard,
    needs_scale,
    quantize_at,
    quantize_dynamic,
    tensor_scale,
    values_of,
)
from ._state import QuantState, Seen, check_state, measure, state_gradient, warn_if_not_updated

LHS, RHS, COTANGENT = 0, 1, 2  # rows of a QuantState


def wrong_label(*terms: str) -> str:
    """Return a label that is in only one term, or twice in a term; "" if there is none."""
    counts = {c: [term.count(c) for term in terms] for c in "".join(terms)}
    return next((c for c, n in counts.items() if max(n) > 1 or sum(n) < 2), "")


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A two-operand einsum in which every label is in at least two of the three terms.

    Attributes:
        lhs, rhs, out: one letter per dimension, as in an einsum.

    Example:
        >>> Contraction("btk", "kn", "btn").grad_rhs
        Contraction(lhs='btk', rhs='btn', out='kn')
    """

    lhs: str
    rhs: str
    out: str

    def __post_init__(self) -> None:
        if wrong := wrong_label(self.lhs, self.rhs, self.out):
            raise ValueError(
                "unitscale.quant.Contraction: every label must be in at least two of the three "
                f"terms, once in each; got {wrong!r} in {self.lhs},{self.rhs}->{self.out}"
            )

    @cached_property
    def summed(self) -> str:
        """Labels that the matmul sums over, in the order of the left operand."""
        return "".join(c for c in self.lhs if c in self.rhs and c not in self.out)

    @cached_property
    def grad_lhs(self) -> "Contraction":
        """Contraction of cotangent and right operand that gives the left gradient."""
        return Contraction(self.out, self.rhs, self.lhs)

    @cached_property
    def grad_rhs(self) -> "Contraction":
        """Contraction of left operand and cotangent that gives the right gradient."""
        return Contraction(self.lhs, self.out, self.rhs)


def _scale_in_result(scale: jax.Array, labels: str, out: str) -> jax.Array:
    """Reshape the scale of an operand so that it broadcasts against the result ``out``."""
    if scale.ndim == 0:
        return scale
    kept = [axis for axis, c in enumerate(labels) if c in out]
    squeezed = lax.squeeze(scale, [axis for axis in range(scale.ndim) if axis not in kept])
    order = sorted(range(len(kept)), key=lambda i: out.index(labels[kept[i]]))
    new = [axis for axis, c in enumerate(out) if c not in labels]
    return lax.expand_dims(lax.transpose(squeezed, order), new)


def scaled_matmul(
    lhs: jax.Array | ScaledArray,
    rhs: jax.Array | ScaledArray,
    spec: Contraction,
    factor: float | jax.Array,
    out_dtype: Any,
    *,
    exact: bool = False,
) -> jax.Array:
    """Return ``factor * einsum(lhs, rhs)`` in ``out_dtype``, accumulated in float32.

    ``exact`` is for FP8 on Hopper GPUs (`MatmulConfig`, accumulation).

    Scaling:
        dot(lhs.data, rhs.data) * (factor * lhs.scale * rhs.scale): one dot and one multiply, which
        XLA compiles to a single GEMM kernel. Scales that vary along a summed dimension, such as
        block scales, multiply the data before the dot. float16 and float32 results are multiplied
        in the accumulator and rounded once; bfloat16 results are multiplied after rounding.
        factor * lhs.scale * rhs.scale becomes 0 below 2^-126 and saturates in float32. MXFP8 and
        NVFP4 operands stay in 8 and 4 bits where the GPU multiplies them (from sm_100).
    """
    batch = [c for c in spec.lhs if c in spec.rhs and c in spec.out]
    free = [c for labels in (spec.lhs, spec.rhs) for c in labels if c not in (*batch, *spec.summed)]
    order = [(batch + free).index(c) for c in spec.out]
    out_dtype = jnp.dtype(out_dtype)

    if (y := _lowering.block_scaled_dot(lhs, rhs, spec, batch + free, out_dtype)) is not None:
        return narrow(lax.transpose(y, order) * factor, out_dtype)
    operands, scales, sizes = [], [], {}
    for x, labels in ((lhs, spec.lhs), (rhs, spec.rhs)):
        own = zip(labels, x.shape, strict=False)
        if x.ndim != len(labels) or any(sizes.setdefault(c, n) != n for c, n in own):
            raise ValueError(
                f"unitscale.quant: operands must have the dimensions {spec.lhs!r} and "
                f"{spec.rhs!r}, equal for equal labels; got shapes {tuple(lhs.shape)} and "
                f"{tuple(rhs.shape)}. Reshape or transpose one, or give it other labels."
            )
        summed = [axis for axis, c in enumerate(labels) if c in spec.summed]
        if not isinstance(x, ScaledArray) or (scale := x.scale) is None:
            operands.append(_lowering.data_of(x))
        elif x.block_shape or (scale.ndim and any(scale.shape[axis] > 1 for axis in summed)):
            operands.append(dequantize(x))
        else:
            operands.append(x.data)
            scales.append(_scale_in_result(to_float(scale), labels, spec.out))

    left, right = operands
    dtype = result_dtype(left, right)
    if left.dtype != right.dtype and max(left.dtype.itemsize, right.dtype.itemsize) > 1:
        left, right = left.astype(dtype), right.astype(dtype)  # two 8-bit types stay as they are
    accumulator = out_dtype
    if out_dtype != jnp.bfloat16 or dtype.itemsize > 2:
        # bfloat16 has float32's range, so the factor can multiply the rounded result, and XLA folds
        # it into the GEMM. In float16 the factor must multiply the wide sum before rounding.
        wide = wide_dtype(dtype), wide_dtype(out_dtype)
        accumulator = max(wide, key=lambda dtype: dtype.itemsize)

    numbers = tuple(
        tuple(tuple(map(labels.index, group)) for labels in (spec.lhs, spec.rhs))
        for group in (spec.summed, batch)
    )
    sharding = _lowering.output_sharding(left, right, spec, batch + free)
    y = _lowering.dot(left, right, numbers, accumulator, sharding, exact)
    y = y if order == sorted(order) else lax.transpose(y, order)

    if not scales and not isinstance(factor, jax.Array):
        return narrow(y if factor == 1 else y * factor, out_dtype)
    total: Any = factor
    if len(scales) == 2:
        # Multiply smallest and largest first: no intermediate result overflows or underflows.
        low, high = jnp.minimum(*scales), jnp.maximum(*scales)
        middle = jnp.maximum(low, jnp.minimum(high, factor))
        total = jnp.minimum(low, factor) * jnp.maximum(high, factor) * middle
    elif scales:
        total = scales[0] * factor
    if scales:  # infinity * 0 would be NaN
        largest = min(float(jnp.finfo(dtype).max) for dtype in (y.dtype, jnp.float32))
        total = jnp.minimum(total, largest)
    return narrow(y * total.astype(y.dtype), out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _cast(x, dtype):  # `unitscale.analysis` recognizes casts by this name
    return narrow(x, dtype)


def _refuse(x, dtype):
    raise TypeError(
        "unitscale.quant: an FP8 matmul has no second derivative, because cotangents of its 8-bit "
        "operands would be 8-bit numbers without a scale. For gradient penalties, forces and "
        "Hessians use layers in 16 or 32 bits: policy='bfloat16', or exclude these layers from "
        "nn.convert."
    )


_cast.defvjp(_refuse, _refuse)


def _quantize(
    x: jax.Array,
    which: int,
    axes: tuple[int, ...],
    config: MatmulConfig | None,
    state: QuantState | None,
) -> tuple[Any, Seen | None]:
    """Quantize tensor ``which`` of a matmul that sums over ``axes``; measure it for a state."""
    if config is None:
        return x, None
    strategy, name = config.strategy, (config.lhs, config.rhs, config.cotangent)[which]
    fmt = format_of(name)
    to: Any = _cast if fmt.dtype is not None and fmt.dtype.itemsize == 1 else cast
    if fmt.name == "float4_e2m1fn" and jax.default_backend() == "cpu":
        # XLA converts to 4 bits slowly there (jax 0.10.2), and E4M3 holds the same numbers.
        grid = dataclasses.replace(fmt, dtype=None)
        to = lambda x, _: _cast(cast(x, grid), "float8_e4m3fn")  # noqa: E731
    if config.dither and which == COTANGENT:
        nearest, to = to, lambda x, name: nearest(dithered(x, fmt), name)
    if isinstance(strategy, Block):
        strategy = strategy.of_operand(which)
    if isinstance(strategy, Static) and state is None:
        return quantize_at(x, name, strategy.scales[which], to), None
    if isinstance(strategy, Unit) or not needs_scale(fmt):
        return ScaledArray(to(x, name)), None
    if state is None:
        axes = tuple(axis % x.ndim for axis in axes)
        return quantize_dynamic(x, name, strategy, axes, to), None
    margin = state.strategy.margin
    scale = tensor_scale(x, fmt, margin) if state.calibrating else state.scale[which]
    return quantize_at(x, name, scale, to), measure(x, fmt, scale)


@dataclasses.dataclass(frozen=True)
class Core:
    """The static description of a matmul, and its steps. `GroupedCore` is a subclass."""

    spec: Contraction
    factors: tuple[float, ...]
    config: MatmulConfig | None
    out_dtype: Any
    dtypes: tuple[Any, Any]  # dtypes of the two gradients
    names: bool = dataclasses.field(default_factory=_lowering.are_named)  # see `named_operands`

    def quantize(
        self, x: jax.Array, which: int, state: QuantState | None, spec: Contraction
    ) -> tuple[Any, Seen | None]:
        """Quantize a tensor for the matmul ``spec``."""
        labels = (spec.lhs, spec.rhs, self.spec.out)[which]
        # Count axes from the end: grouped matrices have a leading dimension without a label.
        axes = tuple(axis - len(labels) for axis, c in enumerate(labels) if c in spec.summed)
        return _quantize(x, which, axes, self.config, state)

    def requantizes(self, which: int) -> bool:
        """Return whether a tensor differs between its two matmuls."""
        config = self.config
        if config is None:
            return False
        if which != RHS and (config.hadamard or config.wide_weight_gradient):
            return True
        strategy = config.strategy
        if isinstance(strategy, Block):
            return which == COTANGENT or strategy.of_operand(which).dims == 1
        # With channel scales the cotangent is multiplied by those of the saved operand.
        channel = isinstance(strategy, Dynamic) and strategy.granularity == "channel"
        return channel and which == COTANGENT

    def for_backward(self, x: jax.Array, which: int, state: QuantState | None) -> Any:
        """Return lhs or cotangent for the weight gradient, or rhs for the left gradient."""
        config = self.config
        assert config is not None, "operands without a config have one form"
        if which == RHS:
            return self.quantize(x, RHS, state, self.spec.grad_lhs)[0]
        if config.wide_weight_gradient:
            return x
        if config.hadamard and (summed := self.spec.grad_rhs.summed):
            labels = self.spec.lhs if which == LHS else self.spec.out
            x = hadamard(x, labels.index(summed[-1]))
        return self.quantize(x, which, state, self.spec.grad_rhs)[0]

    def multiply(
        self, lhs: Any, rhs: Any, groups: Any, spec: Contraction, factor: Any, dtype: Any
    ) -> jax.Array:
        """Run the matmul of the output or the left gradient; ``groups`` are sizes of groups."""
        del groups
        exact = self.exact(forward=spec.out == self.spec.out)
        return scaled_matmul(lhs, rhs, spec, factor, dtype, exact=exact)

    def exact(self, *, forward: bool) -> bool:
        """Return whether a matmul accumulates exactly (`MatmulConfig`)."""
        how = "fast" if self.config is None else self.config.accumulation
        return how == "exact" or (how == "fast_forward" and not forward)

    def gather(self, rhs: Any) -> Any:
        """Gather an FP8 weight that the mesh axis fsdp shards, once for both of its matmuls.

        It is named "gathered": see `_lowering.named`.
        """
        # Grouped matrices have a dimension without a label; XLA chooses how to gather them.
        is_weight = not set(self.spec.rhs) & set(self.spec.lhs) & set(self.spec.out)
        is_weight = is_weight and rhs.ndim == len(self.spec.rhs)
        if fsdp_devices() == 1 or not (is_weight and is_scaled(rhs) and is_float8(rhs.dtype)):
            return rhs
        whole = [()] * rhs.ndim
        return rhs.map_data(lambda x: _lowering.named(reshard_bits(x, whole), "gathered"))

    def both_layouts(self, x: Any, which: int) -> tuple[Any, Any]:
        """Return a quantized tensor for each of its two matmuls, in the order in which they run.

        It may be `Moved` for the weight gradient, and the right operand for the forward matmul.
        """
        labels = (self.spec.lhs, self.spec.rhs, self.spec.out)[which]
        summed = self.spec.summed if which == RHS else self.spec.grad_rhs.summed
        if not labels.startswith(summed):
            return x, x
        same, moved = _lowering.both_layouts(x, len(summed), stored=which == RHS)
        return (moved, same) if which == RHS else (same, moved)

    def weight_gradient(
        self, lhs: Any, cotangent: Any, groups: Any, factor: Any, dtype: Any
    ) -> jax.Array:
        """Run the matmul of the right gradient. Operands may be `Moved`."""
        del groups
        spec = _in_layouts(self.spec.grad_rhs, lhs, cotangent)
        if isinstance(lhs, Moved):  # XLA would merge matmuls and copy their operands together
            lhs, cotangent = lax.optimization_barrier((lhs, cotangent))
        lhs, cotangent = _lowering.operand_of(lhs), _lowering.operand_of(cotangent)
        multiply = partial(scaled_matmul, exact=self.exact(forward=False))
        label, count = self.spec.out[:1], 1
        if label and label in self.spec.grad_rhs.summed:
            count = parts_to_exchange(cotangent.shape[spec.rhs.index(label)])
        if count == 1 or any(is_scaled(x) and x.block_shape for x in (lhs, cotangent)):
            return multiply(lhs, cotangent, spec, factor, dtype)
        parts = "." + label
        split = Contraction(
            spec.lhs.replace(label, parts), spec.rhs.replace(label, parts), "." + spec.out
        )
        lhs = _in_parts(lhs, spec.lhs.index(label), count)
        cotangent = _in_parts(cotangent, spec.rhs.index(label), count)
        return sum_parts(multiply(lhs, cotangent, split, factor, dtype))

    def differentiate(
        self,
        lhs: Any,
        rhs: Any,
        cotangent: jax.Array,
        groups: Any,
        factors: Sequence[Any],
        state: QuantState | None,
        transposed: ScaledArray | None = None,  # transpose of the right operand, if available
    ) -> tuple[jax.Array, jax.Array, Seen | None]:
        """Return the gradients of the operands, and statistics of the cotangent."""
        spec, like = self.spec, (_lowering.data_of(lhs), _lowering.data_of(rhs))
        left, seen = spec.grad_lhs, None
        if self.requantizes(COTANGENT):
            for_lhs, rhs = _move_scale(cotangent, spec.out, rhs, spec.rhs)
            for_rhs, lhs = _move_scale(cotangent, spec.out, lhs, spec.lhs)
            for_lhs, seen = self.quantize(for_lhs, COTANGENT, state, spec.grad_lhs)
            for_rhs = self.for_backward(for_rhs, COTANGENT, state)
        else:
            quantized, seen = self.quantize(cotangent, COTANGENT, state, spec)
            for_lhs, for_rhs = self.both_layouts(quantized, COTANGENT)
        if transposed is not None:
            rhs, left = transposed, Contraction(spec.out, spec.rhs[::-1], spec.lhs)
        grad_lhs = self.multiply(for_lhs, rhs, groups, left, factors[0], self.dtypes[0])
        dtype = self.dtypes[1] if self.config is None else weight_gradient_dtype(self.dtypes[1])
        grad_rhs = self.weight_gradient(lhs, for_rhs, groups, factors[1], dtype)
        grad_rhs = lax.convert_element_type(grad_rhs, self.dtypes[1])
        reshard_like = _lowering.reshard_like
        return reshard_like(grad_lhs, like[0]), reshard_like(grad_rhs, like[1]), seen


def _in_layouts(spec: Contraction, lhs: Any, rhs: Any) -> Contraction:
    """Return ``spec`` for operands that may be `Moved`: their summed labels come last."""
    n = len(spec.summed)
    pairs = (lhs, spec.lhs), (rhs, spec.rhs)
    left, right = (t[n:] + t[:n] if isinstance(x, Moved) else t for x, t in pairs)
    return Contraction(left, right, spec.out)


def _in_parts(x: Any, axis: int, count: int) -> Any:
    """Split an operand's dimension into ``count`` parts, one per device."""
    if is_scaled(x):
        scale = x.scale if x.scale is None or not x.scale.ndim else _in_parts(x.scale, axis, count)
        return ScaledArray(_in_parts(x.data, axis, count), scale)
    size = x.shape[axis]
    parts = (count, size // count) if size > 1 else (1, 1)  # one scale for all parts
    return x.reshape(*x.shape[:axis], *parts, *x.shape[axis + 1 :])


def _move_scale(cotangent: Any, out: str, operand: Any, labels: str) -> tuple[Any, Any]:
    """Move the channel scale of a saved operand into the cotangent.

    The backward matmul sums over the channels, so the scale cannot multiply its result.
    """
    if not _lowering.has_scales(operand) or operand.block_shape:
        return cotangent, operand
    scale = _scale_in_result(to_float(operand.scale), labels, out)
    return widen(cotangent) * scale, operand.data


@partial(custom_vjp, nondiff_argnums=(5,))
def matmul(lhs, rhs, groups, multiplier, state, core):
    """Run a `Core`. ``multiplier`` multiplies the result and both gradients; it has no gradient."""
    return _matmul_fwd(lhs, rhs, groups, multiplier, state, core)[0]


def _matmul_fwd(lhs, rhs, groups, multiplier, state, core):
    left, lhs, saw_lhs = _operands(core, lhs, LHS, state)
    right, rhs, saw_rhs = _operands(core, rhs, RHS, state)
    factors = core.factors
    if multiplier is not None:
        multiplier = jnp.asarray(multiplier)
        factors = tuple(factor * multiplier for factor in factors)
    if core.config is not None and groups is None:  # XLA does not merge matmuls across loops
        left, right, rhs, factors = _lowering.isolate(left, right, rhs, factors)
    spec, right = _in_layouts(core.spec, left, right), _lowering.operand_of(right)
    y = core.multiply(left, right, groups, spec, factors[0], core.out_dtype)
    own = [factor if isinstance(factor, jax.Array) else None for factor in factors[1:]]
    return y, (lhs, rhs, groups, state, (saw_lhs, saw_rhs), own)


def _operands(core, x, which, state):
    """Quantize an operand: return its forms in the forward and backward matmul, and statistics."""
    name = core.names and core.config is not None and which == LHS
    named = partial(jax.tree.map, _lowering.named) if name else lambda x: x
    quantized, seen = core.quantize(x, which, state, core.spec)
    quantized = core.gather(quantized) if which == RHS else named(quantized)
    if core.requantizes(which):
        return quantized, named(core.for_backward(x, which, state)), seen
    return *core.both_layouts(quantized, which), seen


def _matmul_bwd(core, residuals, cotangent):
    lhs, rhs, groups, state, seen, own = residuals
    pairs = zip(core.factors[1:], own, strict=True)
    factors = [factor if array is None else array for factor, array in pairs]
    grad_lhs, grad_rhs, saw = core.differentiate(lhs, rhs, cotangent, groups, factors, state)
    sizes = _lowering.data_of(lhs).size, _lowering.data_of(rhs).size, cotangent.size
    return grad_lhs, grad_rhs, None, None, state_gradient(state, (*seen, saw), sizes)


matmul.defvjp(_matmul_fwd, _matmul_bwd)


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
        drhs = bwd_rhs * einsum(q(lhs), q(dout)), where q divides by a scale that the strategy of
        ``config`` chooses, and casts with saturation. Scales multiply the result (`scaled_matmul`).

        Each tensor is quantized once, and quantized operands are saved for the backward pass. With
        channel or block scales the cotangent is quantized separately for each backward matmul.
        Before that, it is multiplied by the channel scales of the saved operand. With blocks in one
        dimension (`Block`) all three tensors are quantized for each of their matmuls.

    Args:
        lhs: floating, with dimensions ``spec.lhs``.
        rhs: floating, with dimensions ``spec.rhs``.
        spec: the contraction.
        factors: static (fwd, bwd_lhs, bwd_rhs).
        config: formats and strategy; None multiplies the operands in their promoted dtype.
        out_dtype: dtype of the result; by default the dtype of lhs with ``config``, else the
            promoted dtype (8-bit types count as bfloat16). Gradients have their operands' dtypes.
        state: the scales of `Delayed`, or of `Static` without scales. Its gradient holds the amax
            statistics of the three tensors, for `QuantState.advance`.
        multiplier: scalar array, such as an operand's scale, that multiplies the results of all
            three matmuls. It gets no gradient.

    Raises:
        ValueError: if the strategy needs a state and there is none, or it is of another strategy.

    Example:
        >>> x, w = jnp.ones((2, 8)), jnp.ones((8, 3))
        >>> spec = Contraction("bk", "kn", "bn")
        >>> print(contract(x, w, spec, config=MatmulConfig())[0])
        [8. 8. 8.]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (matmul).
    """
    check_state("contract", config, state)
    lhs, rhs = warn_if_not_updated((lhs, rhs), state)
    if out_dtype is None:
        out_dtype = result_dtype(lhs, rhs) if config is None else result_dtype(lhs)
    factors, dtypes = tuple(map(float, factors)), (lhs.dtype, rhs.dtype)
    core = Core(spec, factors, config, jnp.dtype(out_dtype), dtypes)
    return matmul(lhs, rhs, None, multiplier, state, core)


class Multiplier:
    """Chunked matmul: multiply chunks of a left operand by one right operand, quantized once.

    It serves ops such as `ops.readout_cross_entropy`, which define their own gradients and never
    hold the whole result. JAX cannot differentiate it.

    Scaling:
        As in `contract`, with amax statistics per chunk of the left operand and the cotangent.

    Args:
        rhs: right operand, floating.
        spec: the contraction of a chunk.
        factors: as for `contract`.
        config: as for `contract`.
        out_dtype: dtype of the results.
        state: as for `contract`.
        parts: number of chunks. With more than one, gradients of the right operand are at least
            float32, so that they can be summed.
        places: mesh axes for labels of the right operand, as for `core.constrain_sharding`. The
            operand is resharded after it is quantized.
        forward: dtype of both operands in the forward matmul; ``config`` then applies only to the
            backward matmuls. None for the formats of ``config``.
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

        def on_mesh(x: Any) -> Any:
            return x.map_data(constrain) if is_scaled(x) else constrain(x)

        quantized, self._seen = self._core.quantize(rhs, RHS, state, spec)
        self._rhs = self._right = on_mesh(quantized)
        if forward is not None:
            self._right = constrain(cast(rhs, forward))
        if self._core.requantizes(RHS):
            self._rhs = on_mesh(self._core.for_backward(rhs, RHS, state))
        self._transposed = _lowering.transposed_copy(self._rhs) if parts > 1 else None

    def __call__(self, lhs: jax.Array) -> tuple[jax.Array, Any]:
        """Multiply a chunk; return the result and the residuals for `gradients`."""
        core = self._core
        quantized, seen = core.quantize(lhs, LHS, self._state, core.spec)
        left = quantized if self._forward is None else cast(lhs, self._forward)
        if core.requantizes(LHS):
            quantized = core.for_backward(lhs, LHS, self._state)
        y = core.multiply(left, self._right, None, core.spec, core.factors[0], core.out_dtype)
        return y, (quantized, seen, lhs.dtype)

    def gradients(
        self, part: Any, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, QuantState | None]:
        """Return the gradients of the chunk, the right operand and the state.

        Sum the last two over all chunks; then add `shared_gradient` to the state's gradient.
        """
        lhs, saw_lhs, dtype = part
        core = dataclasses.replace(self._core, dtypes=(dtype, self._core.dtypes[1]))
        left, right, saw = core.differentiate(
            lhs, self._rhs, cotangent, None, core.factors[1:], self._state, self._transposed
        )
        sizes = lhs.size, 0, cotangent.size
        return left, right, state_gradient(self._state, (saw_lhs, None, saw), sizes)

    @property
    def shared_gradient(self) -> QuantState | None:
        """The right operand's contribution to the `QuantState`'s gradient (amax and counts)."""
        return state_gradient(self._state, (None, self._seen, None), (0, self._rhs.size, 0))


@partial(custom_vjp, nondiff_argnums=(3, 4))
def _fake(lhs, rhs, state, config, axes):
    return _fake_fwd(lhs, rhs, state, config, axes)[0]


def _fake_fwd(lhs, rhs, state, config, axes):
    q_lhs, saw_lhs = _quantize(lhs, LHS, axes[0], config, state)
    q_rhs, saw_rhs = _quantize(rhs, RHS, axes[1], config, state)
    values = values_of(q_lhs, lhs), values_of(q_rhs, rhs)
    return values, state_gradient(state, (saw_lhs, saw_rhs, None), (lhs.size, rhs.size, 0))


def _fake_bwd(config, axes, state, cotangents):
    return *cotangents, state


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
    lhs, rhs = warn_if_not_updated((lhs, rhs), state)
    return _fake(lhs, rhs, state, config, axes)

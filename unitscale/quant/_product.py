"""The one differentiable contraction: quantized operands, wide accumulator, static factors.

Every matrix product of the library is a `contract`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import ScaledArray, custom_vjp, dithered, format_of, result_dtype, to_float, widen
from ._amax import needs_scale, tensor_scale
from ._config import MatmulConfig
from ._contraction import Contraction, Factor, data_of, in_result, placed_as, product
from ._once import differentiated_once
from ._quantize import quantize, quantize_at
from ._state import QuantState, Seen, check_state, measure, state_gradient
from ._strategies import Block, Dynamic, Static
from ._turned import turned_product
from ._watch import watched

LHS, RHS, COTANGENT = 0, 1, 2


def axes_of(labels: str, summed: str) -> tuple[int, ...]:
    """The places of some labels.

    Example:
        >>> axes_of("btk", "bk")
        (0, 2)
    """
    return tuple(axis for axis, c in enumerate(labels) if c in summed)


def quantize_tensor(
    x: jax.Array,
    which: int,
    axes: tuple[int, ...],
    config: MatmulConfig | None,
    state: QuantState | None,
) -> tuple[Any, Seen | None]:
    """One of a product's tensors as it is multiplied; ``axes`` are those that are summed over.

    Args:
        x: the tensor.
        which: its place among `TENSORS`.
        axes: the dimensions that the product sums over.
        config: formats and strategy; None leaves the tensor as it is.
        state: the scales of a strategy that keeps them.

    Returns:
        The ScaledArray (or the array itself), and what a state is to see of it.

    Raises:
        TypeError: where it is differentiated: see `differentiated_once`.
    """
    if config is None:
        return x, None
    quantized, seen = _quantized(x, which, axes, config, state)
    return differentiated_once(quantized), seen


def _quantized(
    x: jax.Array,
    which: int,
    axes: tuple[int, ...],
    config: MatmulConfig,
    state: QuantState | None,
) -> tuple[ScaledArray, Seen | None]:
    dtype = (config.lhs, config.rhs, config.cotangent)[which]
    strategy = config.strategy
    if config.dither and which == COTANGENT:
        x = dithered(x, format_of(dtype).mantissa_bits)
    if state is not None:
        if not needs_scale(dtype):
            return quantize_at(x, dtype, 1), None
        fmt = format_of(dtype)
        scale = state.scale[which]
        if state.calibrating:
            scale = tensor_scale(x, fmt, state.strategy.margin)
        return quantize_at(x, dtype, scale), measure(x, fmt, scale)
    if isinstance(strategy, Static):
        return quantize_at(x, dtype, strategy.scales[which]), None
    return quantize(x, dtype, strategy, axis=axes), None


def is_per_slice(config: MatmulConfig | None) -> bool:
    """Whether scales differ along dimensions, so that each product needs its own cotangent."""
    strategy = None if config is None else config.strategy
    return isinstance(strategy, Block) or (
        isinstance(strategy, Dynamic) and strategy.granularity == "channel"
    )


@partial(custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _contract(lhs, rhs, multiplier, state, spec, factors, config, out_dtype):
    return _contract_fwd(lhs, rhs, multiplier, state, spec, factors, config, out_dtype)[0]


def _contract_fwd(lhs, rhs, multiplier, state, spec, factors, config, out_dtype):
    like = tuple(jnp.zeros((0,), x.dtype) for x in (lhs, rhs))
    lhs, saw_lhs = quantize_tensor(lhs, LHS, axes_of(spec.lhs, spec.summed), config, state)
    rhs, saw_rhs = quantize_tensor(rhs, RHS, axes_of(spec.rhs, spec.summed), config, state)
    own: dict[int, Any] = {}
    if multiplier is not None:
        own = {i: factor * multiplier for i, factor in enumerate(factors)}
    elif config is not None:
        own = {i: jnp.asarray(factor) for i, factor in enumerate(factors) if factor != 1}
    own_lhs, own_rhs = lhs, rhs
    if config is not None:
        own_lhs, own_rhs, own = _apart(lhs, rhs, own)
    y = product(own_lhs, rhs, spec, own.pop(0, factors[0]), out_dtype)
    no_gradient = jax.tree.map(jnp.zeros_like, multiplier)
    return y, (lhs, own_rhs, no_gradient, like, state, (saw_lhs, saw_rhs), own)


def _apart(lhs: Any, rhs: Any, factors: dict[int, Any]) -> tuple[Any, Any, dict[int, Any]]:
    """The left operand of the forward and the right one of the backward as no other product's.

    With its factors: XLA makes one product of several that share an operand, and then copies its
    parts; and it folds a factor into a GEMM only where nothing else is multiplied by the same
    number. In their other products operands are laid out the other way: those are left as they are,
    so that XLA turns them where it casts them. And what is for the backward depends on no left
    operand, which may be computed again meanwhile.
    """
    forward = {i: factor for i, factor in factors.items() if i == 0}
    backward = {i: factor for i, factor in factors.items() if i > 0}
    own_lhs, forward, _ = lax.optimization_barrier((lhs, forward, rhs))
    own_rhs, backward = lax.optimization_barrier((rhs, backward))
    return own_lhs, own_rhs, forward | backward


def _without_scale(cotangent, labels, operand, operand_labels):
    """Moves the scale that an operand has along the cotangent's dimensions into the cotangent.

    The backward products sum over those dimensions, so that the scale cannot follow the product.
    """
    if operand.block_shape:
        return cotangent, operand
    scale = to_float(in_result(operand.scale, operand_labels, labels))
    return widen(cotangent) * scale, operand.data


def operand_gradients(
    lhs: Any,
    rhs: Any,
    cotangent: jax.Array,
    spec: Contraction,
    factors: tuple[Factor, Factor],
    config: MatmulConfig | None,
    state: QuantState | None,
    dtypes: tuple[Any, Any],
    turned: Any = None,
) -> tuple[jax.Array, jax.Array, Seen | None]:
    """The gradients of a product's operands, given as they were multiplied, and of what was seen.

    Args:
        lhs: left operand, of `quantize_tensor`.
        rhs: right operand, of `quantize_tensor`.
        cotangent: of the result.
        spec: of the product.
        factors: (bwd_lhs, bwd_rhs).
        config: formats and strategy.
        state: the scales of a strategy that keeps them.
        dtypes: of the two gradients.
        turned: the right operand with its dimensions reversed, for the left gradient; None if
            there is no such copy.

    Returns:
        The left gradient, the right one, and what a state is to see of the cotangent.
    """
    saw, places = None, [data_of(x) for x in (lhs, rhs)]
    if is_per_slice(config):
        for_lhs, rhs = _without_scale(cotangent, spec.out, rhs, spec.rhs)
        for_rhs, lhs = _without_scale(cotangent, spec.out, lhs, spec.lhs)
        axes = axes_of(spec.out, spec.grad_lhs.summed), axes_of(spec.out, spec.grad_rhs.summed)
        for_lhs, _ = quantize_tensor(for_lhs, COTANGENT, axes[0], config, state)
        for_rhs, _ = quantize_tensor(for_rhs, COTANGENT, axes[1], config, state)
    else:
        # Quantized once, for both of its products.
        for_lhs, saw = quantize_tensor(cotangent, COTANGENT, (), config, state)
        for_rhs = for_lhs
    for_left = spec.grad_lhs
    if turned is not None:
        rhs, for_left = turned, Contraction(spec.out, spec.rhs[::-1], spec.lhs)
    grad_lhs = product(for_lhs, rhs, for_left, factors[0], dtypes[0])
    grad_rhs = turned_product(lhs, for_rhs, spec.grad_rhs, factors[1], dtypes[1])
    return placed_as(grad_lhs, places[0]), placed_as(grad_rhs, places[1]), saw


def _contract_bwd(spec, factors, config, out_dtype, residuals, cotangent):
    lhs, rhs, no_gradient, like, state, seen, own = residuals
    for_lhs, for_rhs = (own.get(i, factors[i]) for i in (1, 2))
    dtypes = tuple(x.dtype for x in like)
    grad_lhs, grad_rhs, saw = operand_gradients(
        lhs, rhs, cotangent, spec, (for_lhs, for_rhs), config, state, dtypes
    )
    if state is None:
        return grad_lhs, grad_rhs, no_gradient, None
    sizes = lhs.size, rhs.size, cotangent.size
    return grad_lhs, grad_rhs, no_gradient, state_gradient(state, (*seen, saw), sizes)


_contract.defvjp(_contract_fwd, _contract_bwd)


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
    """Contracts two arrays with static forward and backward factors.

    Scaling:
        out = fwd * einsum(q(lhs), q(rhs)), dlhs = bwd_lhs * einsum(q(dout), q(rhs)),
        drhs = bwd_rhs * einsum(q(lhs), q(dout)), where q divides by the scale of the strategy of
        ``config``, casts saturating, and the scales multiply the product; or nothing. All three
        accumulate in float32. float16 and float32 results are multiplied by their factor and
        scales in the accumulator and rounded once; bfloat16 results, whose range is that of
        float32, are rounded and multiplied in bfloat16. On a GPU the factor of a quantized product
        is a scale of its kernel, which rounds once.

        Each tensor is quantized once, and operands are saved for the backward as they were
        multiplied. The exceptions are channel and block scales, which lie along other dimensions
        in each product: the cotangent is quantized for each of its two, times the channel scales
        of the saved operand, and saved blocks are multiplied as the values that they hold.

    Args:
        lhs: left operand, floating, dimensions as labelled by ``spec.lhs``.
        rhs: right operand, floating, dimensions as labelled by ``spec.rhs``.
        spec: the contraction.
        factors: static (fwd, bwd_lhs, bwd_rhs).
        config: operand formats; None multiplies the operands in their promoted dtype.
        out_dtype: dtype of the result; by default that of lhs when quantized, else the promoted
            one, 8-bit types counting as bfloat16. Each gradient has the dtype of its operand.
        state: the scales of `Delayed`, or of `Static` without scales. Its gradient is what was
            seen of the three tensors, for `QuantState.advance`.
        multiplier: a number known at run time, by which all three products are multiplied besides
            their factors, in one go; such as an operand's scale. It has no gradient itself.

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
    check_state("contract", config, state)
    dtype = result_dtype(lhs, rhs) if config is None else result_dtype(lhs)
    out_dtype = jnp.dtype(dtype if out_dtype is None else out_dtype)
    lhs, rhs = watched((lhs, rhs), state)
    factors = tuple(map(float, factors))
    return _contract(lhs, rhs, multiplier, state, spec, factors, config, out_dtype)

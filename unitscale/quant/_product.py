"""The one differentiable contraction: quantized operands, wide accumulator, static factors.

Every matrix product of the library is a `contract`. Its three products (forward, and the two of
the backward) are emitted in the direct form that XLA turns into a single GEMM kernel: a
dot_general of the stored operands, then one multiplication by a static factor.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import cast, custom_vjp, narrow, result_dtype, wide_dtype
from ._config import MatmulConfig


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A two-operand einsum in which every label stands in at least two of the three terms.

    Attributes:
        lhs: labels of the left operand's dimensions.
        rhs: labels of the right operand's dimensions.
        out: labels of the result's dimensions.

    Example:
        >>> Contraction("btk", "kn", "btn").grad_rhs
        Contraction(lhs='btk', rhs='btn', out='kn')
    """

    lhs: str
    rhs: str
    out: str

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
    return wide_dtype(jnp.promote_types(operand_dtype, wide_dtype(out_dtype)))


def _alike(lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Widens unequal operands to their promoted type; two 8-bit types multiply as they are."""
    if lhs.dtype == rhs.dtype or lhs.dtype.itemsize == rhs.dtype.itemsize == 1:
        return lhs, rhs
    dtype = result_dtype(lhs, rhs)
    return lhs.astype(dtype), rhs.astype(dtype)


def product(
    lhs: jax.Array, rhs: jax.Array, spec: Contraction, factor: float, out_dtype: Any
) -> jax.Array:
    """Returns ``factor * einsum(lhs, rhs)`` in ``out_dtype``, accumulated in float32.

    For float16 and float32 results the factor multiplies the float32 sum, which is rounded once;
    for bfloat16 results it multiplies the rounded sum (see `contract`).

    Example:
        >>> x = jnp.ones((2, 4), jnp.float8_e4m3fn)
        >>> print(product(x, x.T, Contraction("ik", "kj", "ij"), 0.5, jnp.float16))
        [[2. 2.]
         [2. 2.]]
    """
    batch = [c for c in spec.lhs if c in spec.rhs and c in spec.out]
    summed = [c for c in spec.lhs if c in spec.rhs and c not in spec.out]
    positions = [
        tuple(map(labels.index, group))
        for group in (summed, batch)
        for labels in (spec.lhs, spec.rhs)
    ]
    dimension_numbers = ((positions[0], positions[1]), (positions[2], positions[3]))
    lhs, rhs = _alike(lhs, rhs)
    accumulator = _accumulator(result_dtype(lhs, rhs), out_dtype)
    y = lax.dot_general(lhs, rhs, dimension_numbers, preferred_element_type=accumulator)
    free = [c for labels in (spec.lhs, spec.rhs) for c in labels if c not in batch + summed]
    order = [(batch + free).index(c) for c in spec.out]
    y = y if order == sorted(order) else lax.transpose(y, order)
    return narrow(y if factor == 1 else y * factor, out_dtype)


def _quantized(x: jax.Array, dtype: str | None) -> jax.Array:
    return x if dtype is None else cast(x, dtype)


def _formats(config: MatmulConfig | None) -> tuple[str | None, str | None, str | None]:
    return (None, None, None) if config is None else (config.lhs, config.rhs, config.cotangent)


@partial(custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _contract(lhs, rhs, spec, factors, config, out_dtype):
    return _contract_fwd(lhs, rhs, spec, factors, config, out_dtype)[0]


def _contract_fwd(lhs, rhs, spec, factors, config, out_dtype):
    like = tuple(jnp.zeros((0,), x.dtype) for x in (lhs, rhs))
    lhs_format, rhs_format, _ = _formats(config)
    lhs, rhs = _quantized(lhs, lhs_format), _quantized(rhs, rhs_format)
    return product(lhs, rhs, spec, factors[0], out_dtype), (lhs, rhs, like)


def _contract_bwd(spec, factors, config, out_dtype, residuals, cotangent):
    lhs, rhs, (like_lhs, like_rhs) = residuals
    # Quantized once, for both of its products.
    cotangent = _quantized(cotangent, _formats(config)[2])
    _, grad_lhs, grad_rhs = factors
    return (
        product(cotangent, rhs, spec.grad_lhs, grad_lhs, like_lhs.dtype),
        product(lhs, cotangent, spec.grad_rhs, grad_rhs, like_rhs.dtype),
    )


_contract.defvjp(_contract_fwd, _contract_bwd)


def contract(
    lhs: jax.Array,
    rhs: jax.Array,
    spec: Contraction,
    *,
    factors: tuple[float, ...] = (1.0, 1.0, 1.0),
    config: MatmulConfig | None = None,
    out_dtype: Any = None,
) -> jax.Array:
    """Contracts two arrays with static forward and backward factors.

    Scaling:
        out = fwd * einsum(q(lhs), q(rhs)), dlhs = bwd_lhs * einsum(q(dout), q(rhs)),
        drhs = bwd_rhs * einsum(q(lhs), q(dout)), where q is the saturating cast of ``config``, or
        nothing. All three accumulate in float32. float16 and float32 results are multiplied by
        their factor in the accumulator and rounded once; bfloat16 results, whose range is that of
        float32, are rounded and multiplied in bfloat16, which a GPU does in the GEMM's epilogue.

    Args:
        lhs: left operand, floating, dimensions as labelled by ``spec.lhs``.
        rhs: right operand, floating, dimensions as labelled by ``spec.rhs``.
        spec: the contraction.
        factors: static (fwd, bwd_lhs, bwd_rhs).
        config: operand formats; None multiplies the operands in their promoted dtype.
        out_dtype: dtype of the result; by default that of lhs when quantized, else the promoted
            one, 8-bit types counting as bfloat16. Each gradient has the dtype of its operand.

    Returns:
        Array with dimensions ``spec.out``.

    Example:
        >>> x, w = jnp.ones((2, 8)), jnp.ones((8, 3))
        >>> spec = Contraction("bk", "kn", "bn")
        >>> print(contract(x, w, spec, config=MatmulConfig())[0])
        [8. 8. 8.]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (matmul).
    """
    dtype = result_dtype(lhs, rhs) if config is None else result_dtype(lhs)
    out_dtype = jnp.dtype(dtype if out_dtype is None else out_dtype)
    return _contract(lhs, rhs, spec, tuple(map(float, factors)), config, out_dtype)

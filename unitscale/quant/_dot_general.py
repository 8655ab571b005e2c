"""`lax.dot_general` with quantized operands, for the `dot_general=` hooks of layer libraries."""

from collections.abc import Callable
from string import ascii_lowercase
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import reshard, result_dtype
from ._config import MatmulConfig
from ._contraction import Contraction
from ._einsum import einsum_contraction, einsum_problem
from ._product import contract
from ._state import QuantState, check_state
from ._strategies import Static


def contraction_of(dimension_numbers: Any, lhs_rank: int, rhs_rank: int) -> Contraction:
    """Returns the `Contraction` of `lax.dot_general`'s dimension numbers.

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
    """What stands behind every hook of a layer library: `contract` with all factors 1.

    Example:
        >>> x, spec = jnp.ones((2, 2)), Contraction("ij", "jk", "ik")
        >>> print(multiply(x, x, spec, MatmulConfig(), out_dtype=jnp.bfloat16)[0])
        [2 2]
    """
    out_dtype = result_dtype(lhs, rhs) if out_dtype is None else out_dtype
    y = contract(lhs, rhs, spec, config=config, out_dtype=out_dtype, state=state)
    return reshard(y, out_sharding)


def dot_general(config: MatmulConfig, state: QuantState | None = None) -> Callable[..., jax.Array]:
    """Returns a `lax.dot_general` with quantized operands and cotangents.

    Fits the ``dot_general=`` hook of `flax.nnx.Linear`, `flax.nnx.Einsum`, `flax.linen.Dense` and
    other layers. Strategies that keep their scales need a ``state`` here, or `DotGeneral`.

    Scaling:
        As `contract` with all factors 1. ``precision`` is ignored: operands have the formats of
        ``config``, and sums are float32. Operands that are not floating are multiplied as they are.

    Args:
        config: formats and strategy.
        state: the scales of a strategy that keeps them.

    Returns:
        A function with the signature of `lax.dot_general`. The result's dtype is the preferred
        one, or that to which the operands promote.

    Raises:
        ValueError: if the strategy needs a state and has none.

    Example:
        >>> dot = dot_general(MatmulConfig(cotangent="e5m2"))
        >>> print(dot(jnp.ones((2, 8)), jnp.ones((8, 3)), (((1,), (0,)), ((), ())))[0])
        [8. 8. 8.]

    References:
        Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv 2209.05433, section 3.
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
        if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (lhs, rhs)):
            return lax.dot_general(
                lhs,
                rhs,
                dimension_numbers,
                precision,
                preferred_element_type,
                out_sharding=out_sharding,
            )
        spec = contraction_of(dimension_numbers, lhs.ndim, rhs.ndim)
        return multiply(
            lhs,
            rhs,
            spec,
            config,
            state,
            out_dtype=preferred_element_type,
            out_sharding=out_sharding,
        )

    return dot


def _check_symmetric(config: MatmulConfig, subscripts: Any) -> None:
    """Raises if it matters which operand of a product is the left one."""
    strategy = config.strategy
    scales = strategy.scales if isinstance(strategy, Static) else None
    if config.lhs != config.rhs or (scales is not None and scales[0] != scales[1]):
        raise ValueError(
            f"unitscale.quant.einsum: both operands of {subscripts!r}, which is not one product "
            "of two matrices, must have one format and static scale, because jnp.einsum may "
            f"exchange them; got {config}. Use dot_general."
        )


def einsum(config: MatmulConfig, state: QuantState | None = None) -> Callable[..., jax.Array]:
    """Returns a `jnp.einsum` whose products are quantized, for `flax.nnx.Einsum(einsum_op=)`.

    An einsum of two operands that is one product of matrices keeps its operands in their places.
    Others are those of `jnp.einsum`, which may exchange them.

    Args:
        config: formats and strategy.
        state: the scales of a strategy that keeps them.

    Returns:
        A function with the signature of `jnp.einsum`. It raises a ValueError if `jnp.einsum` may
        exchange the operands, and they differ in format or static scale.

    Raises:
        ValueError: if the strategy needs a state and has none.

    Example:
        >>> print(einsum(MatmulConfig())("ij,jk->ki", jnp.ones((2, 8)), jnp.ones((8, 3)))[0])
        [8. 8.]
    """
    dot = dot_general(config, state)

    def op(subscripts: Any, *operands: Any, out_sharding: Any = None, **options: Any) -> jax.Array:
        arrays = [jnp.asarray(x) for x in operands]
        if (spec := _one_product(subscripts, arrays)) is not None:
            lhs, rhs = arrays
            dtype = options.get("preferred_element_type")
            return multiply(
                lhs, rhs, spec, config, state, out_dtype=dtype, out_sharding=out_sharding
            )
        _check_symmetric(config, subscripts)
        outside = jax.config.jax_disable_jit  # pyright: ignore[reportAttributeAccessIssue]

        def product(*operands: Any, **options: Any) -> jax.Array:
            with jax.disable_jit(outside):
                return dot(*operands, **options)

        # jnp.einsum jits itself for each `_dot_general`, which its cache would hold for ever, with
        # the state, and compile for at every call of `einsum`. So it runs here as plain Python.
        with jax.disable_jit():
            return jnp.einsum(
                subscripts, *operands, out_sharding=out_sharding, _dot_general=product, **options
            )

    return op


def _one_product(subscripts: Any, operands: list[jax.Array]) -> Contraction | None:
    """The contraction that an einsum of two matrices is; None for any other, and for a broadcast.

    `jnp.einsum` takes a dimension of 1 for one of any size.
    """
    floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
    if not (isinstance(subscripts, str) and len(operands) == 2 and floating):
        return None
    if einsum_problem(subscripts):
        return None
    lhs, rhs = operands
    spec = einsum_contraction(subscripts, lhs.ndim)
    sizes = dict(zip(spec.lhs, lhs.shape, strict=False))
    broadcast = any(sizes.get(c, n) != n for c, n in zip(spec.rhs, rhs.shape, strict=False))
    return None if broadcast else spec

"""Quantized replacements of `lax.dot_general` and `jnp.einsum`, for hooks of layer libraries."""

from collections.abc import Callable
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core import reshard, result_dtype
from ._config import MatmulConfig
from ._matmul import Contraction, contract, wrong_label
from ._state import QuantState, check_state


def contraction_of(dimension_numbers: Any, lhs_rank: int, rhs_rank: int) -> Contraction:
    """Return the `Contraction` of `lax.dot_general`'s dimension numbers.

    Example:
        >>> contraction_of((((1,), (0,)), ((), ())), 2, 2)
        Contraction(lhs='ab', rhs='bc', out='ac')
    """
    (lhs_summed, rhs_summed), (lhs_batch, rhs_batch) = dimension_numbers
    lhs = ascii_lowercase[:lhs_rank]
    pairs = zip((*rhs_batch, *rhs_summed), (*lhs_batch, *lhs_summed), strict=True)
    shared = {right % rhs_rank: lhs[left] for right, left in pairs}
    fresh = iter(ascii_lowercase[lhs_rank:])
    rhs = "".join(shared.get(axis) or next(fresh) for axis in range(rhs_rank))
    batch = "".join(lhs[axis] for axis in lhs_batch)
    free = [c for c in lhs if c not in rhs] + [c for c in rhs if c not in lhs]
    return Contraction(lhs, rhs, batch + "".join(free))


def einsum_problem(subscripts: str) -> str:
    """Return why an einsum is not a single matmul of two operands; "" if it is.

    Example:
        >>> einsum_problem("ab,bc->a")
        "its einsum_str has 'c' in one term only"
    """
    terms, arrow, out = subscripts.replace(" ", "").partition("->")
    lhs, _, rhs = terms.partition(",")
    labels = [term.replace("...", "") for term in (lhs, rhs, out)]
    if not arrow or "..." in rhs or ("..." in lhs) != ("..." in out):
        return "its einsum_str has no ->, or an ellipsis not in both the input and the result"
    if not (wrong := wrong_label(*labels)):
        return ""
    if "".join(labels).count(wrong) > 1:
        return "its einsum_str repeats a label"
    return f"its einsum_str has {wrong!r} in one term only"


def einsum_contraction(subscripts: str, lhs_rank: int) -> Contraction:
    """Return the contraction of an einsum that has no `einsum_problem`; label its ellipsis.

    Example:
        >>> einsum_contraction("...k,kn->...n", 2)
        Contraction(lhs='Ak', rhs='kn', out='An')
    """
    terms, _, out = subscripts.replace(" ", "").partition("->")
    lhs, rhs = terms.split(",")
    spare = "".join(c for c in ascii_uppercase if c not in subscripts)
    hidden = spare[: max(0, lhs_rank - len(lhs.replace("...", "")))]
    return Contraction(lhs.replace("...", hidden), rhs, out.replace("...", hidden))


def contract_for_hook(
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
    """Return a `lax.dot_general` that quantizes operands and cotangents.

    Pass it as ``dot_general=`` to `flax.nnx.Linear`, `flax.linen.Dense` and other layers. Stateful
    strategies need a ``state``; for layers use `nn.DotGeneral`, which holds one.

    Scaling:
        As in `contract`, with all factors 1. ``precision`` is ignored. Integers are not quantized.
        The result has the preferred dtype if given, else the promoted dtype of the operands.

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
        return contract_for_hook(
            lhs, rhs, spec, config, state, out_dtype=dtype, out_sharding=out_sharding
        )

    return dot


def einsum(config: MatmulConfig, state: QuantState | None = None) -> Callable[..., jax.Array]:
    """Return a `jnp.einsum` with a quantized matmul, for `flax.nnx.Einsum(einsum_op=)`.

    The operands keep their order. An einsum that is not a single matmul of two operands raises
    ValueError.

    Example:
        >>> print(einsum(MatmulConfig())("ij,jk->ki", jnp.ones((2, 8)), jnp.ones((8, 3)))[0])
        [8. 8.]
    """
    check_state("einsum", config, state)

    def op(
        subscripts: str,
        *operands: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        problem = einsum_problem(subscripts) if len(operands) == 2 else "it needs two operands"
        if problem:
            raise ValueError(
                "unitscale.quant.einsum: subscripts must be a single matmul of two operands; got "
                f"{subscripts!r}: {problem}. Split the einsum, or use jnp.einsum"
            )
        lhs, rhs = map(jnp.asarray, operands)
        spec, dtype = einsum_contraction(subscripts, lhs.ndim), preferred_element_type
        return contract_for_hook(
            lhs, rhs, spec, config, state, out_dtype=dtype, out_sharding=out_sharding
        )

    return op

"""A product whose left operand comes in parts, and whose result is never whole."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from ..core import ScaledArray, cast, constrain_sharding, is_scaled, wide_dtype
from ._config import MatmulConfig
from ._contraction import Contraction, product
from ._product import LHS, RHS, axes_of, operand_gradients, quantize_tensor
from ._state import QuantState, Seen, check_state, state_gradient


class Part(NamedTuple):
    """A part of the left operand as it was multiplied, and what a state is to see of it.

    Example:
        >>> Part(1.0, None, "float32").seen is None
        True
    """

    lhs: Any
    seen: Seen | None
    dtype: Any


class Multiplier:
    """Multiplies parts of a left operand by one right operand, which is quantized once.

    For ops that take a product apart, as `ops.readout_cross_entropy` does, inside a rule of
    differentiation of their own: nothing here is differentiable. `contract` is the same of a whole.

    Scaling:
        That of `contract`. Statistics of a left operand and of a cotangent are those of a part.

    Args:
        rhs: right operand, floating.
        spec: the contraction of a part.
        factors: static (fwd, bwd_lhs, bwd_rhs).
        config: formats and strategy; None multiplies the operands as they are.
        out_dtype: dtype of the result.
        parts: how many there will be. The gradients of the right operand by more than one are to
            be added up, and so are in float32 or wider; that by a single one is in its own dtype.
        state: the scales of a strategy that keeps them.
        places: for labels of the right operand, axes of a mesh that its dimensions lie over as it
            is multiplied, as for `core.divided`. Parameters come there in few bits.
        forward: dtype that both operands are cast to for the product itself, so that ``config``
            is that of the gradients alone; None for the formats of ``config``.

    Raises:
        ValueError: if the strategy needs a state and has none, or the state of another strategy.

    Example:
        >>> import jax.numpy as jnp
        >>> times = Multiplier(
        ...     jnp.ones((8, 3)), Contraction("bk", "kn", "bn"), (1.0, 1.0, 0.5), None, "float32", 1
        ... )
        >>> y, part = times(jnp.ones((2, 8)))
        >>> dx, dw, _ = times.gradients(part, y)
        >>> print(y[0], dx[0, 0], dw[0])
        [8. 8. 8.] 24.0 [8. 8. 8.]

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (matmul).
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
        self._spec, self._factors, self._config = spec, factors, config
        self._out_dtype, self._state, self._forward = out_dtype, state, forward
        self._grad_dtype = rhs.dtype if parts == 1 else wide_dtype(rhs.dtype)
        axes = axes_of(spec.rhs, spec.summed)
        quantized, self._seen = quantize_tensor(rhs, RHS, axes, config, state)
        place = partial(_placed, labels=spec.rhs, places=places or {})
        self._rhs = place(quantized)
        self._right = self._rhs if forward is None else place(cast(rhs, forward))
        self._turned = _turned(self._rhs) if parts > 1 else None

    def __call__(self, lhs: jax.Array) -> tuple[jax.Array, Part]:
        """The product with a part, and what `gradients` needs of it."""
        axes = axes_of(self._spec.lhs, self._spec.summed)
        quantized, seen = quantize_tensor(lhs, LHS, axes, self._config, self._state)
        left = quantized if self._forward is None else cast(lhs, self._forward)
        y = product(left, self._right, self._spec, self._factors[0], self._out_dtype)
        return y, Part(quantized, seen, lhs.dtype)

    def gradients(
        self, part: Part, cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, QuantState | None]:
        """The gradients of a part, and by it those of the right operand and of the state.

        The last two are to be added up over all parts, with `shared_gradient`.
        """
        dtypes = part.dtype, self._grad_dtype
        spec, factors, config, state = self._spec, self._factors, self._config, self._state
        left, right, saw = operand_gradients(
            part.lhs, self._rhs, cotangent, spec, factors[1:], config, state, dtypes, self._turned
        )
        if state is None:
            return left, right, None
        sizes = math.prod(part.lhs.shape), 0, cotangent.size
        return left, right, state_gradient(state, (part.seen, None, saw), sizes)

    @property
    def shared_gradient(self) -> QuantState | None:
        """What a state is to see of the right operand."""
        if self._state is None:
            return None
        return state_gradient(self._state, (None, self._seen, None), (0, self._rhs.size, 0))


def _placed(x: Any, labels: str, places: Mapping[str, Sequence[str]]) -> Any:
    def place(data: jax.Array) -> jax.Array:
        return constrain_sharding(data, *(places.get(label) for label in labels))

    return x.map_data(place) if is_scaled(x) else place(x)


def _turned(x: Any) -> ScaledArray | None:
    """A matrix of 8 bits with its dimensions reversed, made once; None for anything else.

    A GPU multiplies 8-bit operands along their last dimensions only: XLA would turn the matrix
    again for every part, inside the loop over them. Before the loop it does so where it casts.
    """
    one_scale = is_scaled(x) and (x.scale is None or x.scale.ndim == 0)
    if not one_scale or x.dtype.itemsize > 1:
        return None
    return x.T

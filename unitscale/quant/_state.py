"""What delayed and calibrated scales remember from step to step.

A product with a state returns what it saw of its tensors as the *gradient* of the state: in
``tally``, one bin for each exponent that a scale can have, a 1 in the bin of the exponent that this
step's amax needs. Ones in bins add up, and stay different from zero when they are averaged. So
everything that is done to gradients (a layer used twice, a scan over time, rematerialization,
accumulation over microbatches, psum or pmean over devices) keeps the topmost bin that is not
zero, which is the exponent of the largest amax of them all.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..core import Format, amax, pow2, widen
from ._amax import MAX_EXPONENT, MIN_EXPONENT, needed_exponent
from ._config import MatmulConfig
from ._strategies import Delayed, Static, is_stateful

TENSORS = ("lhs", "rhs", "cotangent")
"""The three tensors of a product, in the order of the rows of a `QuantState`."""

_EXPONENTS = MAX_EXPONENT - MIN_EXPONENT + 1
# Behind the bins of the exponents.
_NOT_FINITE, _SATURATED, _ELEMENTS = _EXPONENTS, _EXPONENTS + 1, _EXPONENTS + 2
_BINS = _EXPONENTS + 3
_EMPTY = MIN_EXPONENT - 1.0


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale", "history", "tally", "counts"],
    meta_fields=["strategy", "calibrating"],
)
@dataclasses.dataclass(frozen=True)
class QuantState:
    """The scales of one product's three tensors, and what they are made from.

    All leaves are float32, so that the state can be differentiated by; leading dimensions may be
    added to all of them, as a scan over layers does. Rows are `TENSORS`.

    Attributes:
        scale: (..., 3), powers of two.
        history: (..., 3, history), the exponents that the amax of the last steps needed, latest
            first; below -126 where there is none.
        tally: (..., 3, bins), what was seen since the last `advance`.
        counts: (..., 3, 4), of the last `advance`: elements beyond the largest value, and
            elements; since the beginning: steps with values that are not finite, and steps with
            elements beyond the largest value.
        strategy: `Delayed`, or `Static` without scales.
        calibrating: whether products take dynamic scales while the state looks on.

    Example:
        >>> state = QuantState.create(Delayed(history=4))
        >>> state.scale.shape, state.history.shape
        ((3,), (3, 4))
    """

    scale: jax.Array
    history: jax.Array
    tally: jax.Array
    counts: jax.Array
    strategy: Delayed | Static
    calibrating: bool = False

    @classmethod
    def create(cls, strategy: Delayed | Static) -> "QuantState":
        """Returns the state before the first step: scales 1 and an empty history.

        Raises:
            TypeError: if the strategy has no state.
        """
        if not is_stateful(strategy):
            raise TypeError(
                "unitscale.quant.QuantState: strategy must be Delayed(...) or Static() without "
                f"scales; got {strategy!r}, which has no state"
            )
        length = strategy.history if isinstance(strategy, Delayed) else 1
        return cls(
            jnp.ones(3, jnp.float32),
            jnp.full((3, length), _EMPTY, jnp.float32),
            jnp.zeros((3, _BINS), jnp.float32),
            jnp.zeros((3, 4), jnp.float32),
            strategy,
        )

    def add(self, gradient: "QuantState") -> "QuantState":
        """Returns the state with what the gradient of a step or microbatch saw."""
        return dataclasses.replace(self, tally=self.tally + gradient.tally)

    def advance(self, gradient: "QuantState | None" = None) -> "QuantState":
        """Ends an optimizer step: what was tallied enters the history, and scales are made from it.

        Scaling:
            scale = 2**(k + margin), k being the largest (or latest) exponent of the history. The
            history of a tensor stays as it was after a step in which the tensor was all zero, not
            used, or not finite in every use. `Static` scales stay, except after a calibration.

        Args:
            gradient: the gradient of the loss by the state; None if it was added before.

        Returns:
            The state of the next step, with an empty tally.

        Example:
            >>> from unitscale.quant import Contraction, MatmulConfig, contract
            >>> config, state = MatmulConfig(strategy=Delayed()), QuantState.create(Delayed())
            >>> def loss(state):
            ...     x, spec = jnp.full((2, 2), 1000.0), Contraction("ij", "jk", "ik")
            ...     return contract(x, x, spec, config=config, state=state).sum()
            >>> print(state.advance(jax.grad(loss)(state)).scale[:2])
            [4. 4.]
        """
        state = self if gradient is None else self.add(gradient)
        tally, strategy = state.tally, state.strategy
        exponents = jnp.arange(MIN_EXPONENT, MAX_EXPONENT + 1, dtype=jnp.float32)
        latest = jnp.max(jnp.where(tally[..., :_EXPONENTS] > 0, exponents, _EMPTY), axis=-1)
        seen = latest > _EMPTY
        rolled = jnp.concatenate([latest[..., None], state.history[..., :-1]], axis=-1)
        history = jnp.where(seen[..., None], rolled, state.history)
        use_max = isinstance(strategy, Static) or strategy.use == "max"
        k = jnp.max(history, axis=-1) if use_max else history[..., 0]
        moves = (k > _EMPTY) & (state.calibrating or isinstance(strategy, Delayed))
        exponent = jnp.minimum(k + strategy.margin, MAX_EXPONENT).astype(jnp.int32)
        saturated, elements = tally[..., _SATURATED], tally[..., _ELEMENTS]
        events = jnp.stack([tally[..., _NOT_FINITE] > 0, saturated > 0], axis=-1)
        counted = state.counts[..., 2:] + events.astype(state.counts.dtype)
        last = jnp.stack([saturated, elements], axis=-1)
        return dataclasses.replace(
            state,
            scale=jnp.where(moves, pow2(exponent), state.scale),
            history=history,
            tally=jnp.zeros_like(tally),
            counts=jnp.concatenate([last, counted], axis=-1),
        )


class Seen(NamedTuple):
    """What is seen of one tensor: the bin of its amax, -1 for zeros, and a count of elements."""

    bin: jax.Array
    saturated: jax.Array


def measure(x: jax.Array, fmt: Format, scale: jax.Array) -> Seen:
    """Returns what a tally gets of a tensor that is quantized at ``scale``."""
    largest = amax(x)
    k = needed_exponent(largest, fmt) - MIN_EXPONENT
    k = jnp.where(jnp.isfinite(largest), jnp.where(largest > 0, k, -1), _NOT_FINITE)
    beyond = jnp.abs(widen(x)) * (1 / scale) > fmt.max
    return Seen(k, jnp.sum(beyond, dtype=jnp.float32))


def state_gradient(
    state: QuantState, seen: tuple[Seen | None, ...], sizes: tuple[int, ...]
) -> QuantState:
    """Returns what a product's backward gives for its state: zeros, and the tally of this use."""
    bins = jnp.arange(_BINS)
    rows = [
        jnp.zeros(_BINS, jnp.float32)
        if tensor is None
        else (bins == tensor.bin).astype(jnp.float32)
        + jnp.where(bins == _SATURATED, tensor.saturated, 0)
        + jnp.where(bins == _ELEMENTS, jnp.float32(size), 0)
        for tensor, size in zip(seen, sizes, strict=True)
    ]
    zeros = jax.tree.map(jnp.zeros_like, state)
    return dataclasses.replace(zeros, tally=jnp.stack(rows))


def check_state(owner: str, config: MatmulConfig | None, state: QuantState | None) -> None:
    """Raises if a strategy lacks its state, or a state is not the one of the product."""
    if config is not None and not isinstance(config, MatmulConfig):
        raise TypeError(
            f"unitscale.quant.{owner}: config must be a quant.MatmulConfig, which is E4M3 at unit "
            f"scale without arguments; got {config!r}"
        )
    strategy = None if config is None else config.strategy
    if state is None:
        if strategy is not None and is_stateful(strategy):
            raise ValueError(
                f"unitscale.quant.{owner}: {strategy!r} keeps its scales in a state; give "
                "state=QuantState.create(strategy), or use a layer or DotGeneral, which hold one"
            )
    elif not isinstance(state, QuantState):
        raise TypeError(
            f"unitscale.quant.{owner}: state must be a QuantState; got {type(state).__name__}. "
            "Load the state of a model that was converted by the same rules"
        )
    elif state.strategy != strategy:
        raise ValueError(
            f"unitscale.quant.{owner}: the state is one of {state.strategy!r}, but the strategy is "
            f"{strategy!r}"
        )
    elif (shape := jnp.shape(state.scale)) != (len(TENSORS),):
        raise ValueError(
            f"unitscale.quant.{owner}: one product needs the scales of one, of shape (3,); got "
            f"{shape}. Scan or vmap over stacked layers, so that each gets its own"
        )

"""Amax state of delayed and calibrated scales.

A matmul returns its amax statistics as the *gradient* of its state. ``tally`` has one bin per scale
exponent, and the bin for the current amax is 1. In a sum or mean of gradients, the highest nonzero
bin belongs to the largest amax, as required for layers used twice, scans, activation checkpointing,
gradient accumulation, and psum or pmean over devices.
"""

import dataclasses
import sys
import warnings
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.custom_derivatives import SymbolicZero

from ..core import MAX_EXPONENT, Format, amax, exponent_to_fit, from_json, pow2, to_json, widen
from ._config import Delayed, MatmulConfig, Static, Strategy

TENSORS = ("lhs", "rhs", "cotangent")
"""The three tensors of a matmul, in the order of the rows of a `QuantState`."""

# Bins of a tally that follow those of the exponents.
_NOT_FINITE = 2 * MAX_EXPONENT + 1
_SATURATED, _ELEMENTS, _BINS = _NOT_FINITE + 1, _NOT_FINITE + 2, _NOT_FINITE + 3
_EMPTY = -MAX_EXPONENT - 1.0
_LIBRARIES = {"unitscale", "jax", "flax", "contextlib"}  # stack frames that a warning skips


def is_stateful(strategy: Strategy) -> TypeGuard[Delayed | Static]:
    """Return whether a strategy keeps its scales in a `QuantState` between steps."""
    return isinstance(strategy, Delayed | Static) and getattr(strategy, "scales", None) is None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale", "history", "tally", "counts"],
    meta_fields=["strategy", "calibrating"],
)
@dataclasses.dataclass(frozen=True)
class QuantState:
    """Scales of the three tensors of a matmul, and the amax history they are computed from.

    All arrays are float32, so that JAX can differentiate with respect to them. The dimension of
    size 3 stands for `TENSORS`; stacked layers add leading dimensions.

    Attributes:
        scale: (..., 3), powers of two.
        history: (..., 3, history), scale exponents of the last steps, latest first; values below
            -126 are empty entries.
        tally: (..., 3, bins), statistics since the last `advance`.
        counts: (..., 3, 4): saturated elements and all elements of the last step, and numbers of
            steps with non-finite values and with saturated elements.
        strategy: `Delayed`, or `Static` without scales.
        calibrating: whether matmuls use dynamic scales while the state records amax.
    """

    scale: jax.Array
    history: jax.Array
    tally: jax.Array
    counts: jax.Array
    strategy: Delayed | Static
    calibrating: bool = False
    keeps_gradient_dtype: ClassVar[bool] = True  # for `unitscale.value_and_grad`

    @classmethod
    def create(cls, strategy: Delayed | Static) -> "QuantState":
        """Return the initial state: scales of 1 and an empty history."""
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
        """Add the state's gradient, from a step or micro-batch, to the tally."""
        return dataclasses.replace(self, tally=self.tally + gradient.tally)

    def advance(self, gradient: "QuantState | None" = None) -> "QuantState":
        """End an optimizer step: append the tally to the history and compute the next scales.

        Scaling:
            scale = 2**(k + margin), where k is the largest (or latest) exponent of the history.
            Steps in which a tensor is zero, unused or not finite are not recorded in its history.
            `Static` scales change only during calibration.

        Args:
            gradient: gradient of the loss with respect to the state; None if `add` was called.

        Example:
            >>> from unitscale.quant import MatmulConfig, dot_general
            >>> config, x = MatmulConfig(strategy=Delayed()), jnp.full((2, 2), 1000.0)
            >>> def loss(state):
            ...     return dot_general(config, state)(x, x, (((1,), (0,)), ((), ()))).sum()
            >>> state = QuantState.create(Delayed())
            >>> print(state.advance(jax.grad(loss)(state)).scale[:2])
            [4. 4.]
        """
        state = self if gradient is None else self.add(gradient)
        tally, strategy = state.tally, state.strategy
        exponents = jnp.arange(-MAX_EXPONENT, MAX_EXPONENT + 1, dtype=jnp.float32)
        latest = jnp.max(jnp.where(tally[..., :_NOT_FINITE] > 0, exponents, _EMPTY), axis=-1)
        rolled = jnp.concatenate([latest[..., None], state.history[..., :-1]], axis=-1)
        history = jnp.where((latest > _EMPTY)[..., None], rolled, state.history)
        use_max = isinstance(strategy, Static) or strategy.use == "max"
        k = jnp.max(history, axis=-1) if use_max else history[..., 0]
        moves = (k > _EMPTY) & (state.calibrating or isinstance(strategy, Delayed))
        exponent = jnp.minimum(k + strategy.margin, MAX_EXPONENT).astype(jnp.int32)
        last = tally[..., _SATURATED : _ELEMENTS + 1]
        events = tally[..., _NOT_FINITE : _SATURATED + 1] > 0
        counted = state.counts[..., 2:] + events.astype(state.counts.dtype)
        return dataclasses.replace(
            state,
            scale=jnp.where(moves, pow2(exponent), state.scale),
            history=history,
            tally=jnp.zeros_like(tally),
            counts=jnp.concatenate([last, counted], axis=-1),
        )


class Seen(NamedTuple):
    """Statistics of a tensor: bin of its amax (-1 if zero), and number of saturated elements."""

    bin: jax.Array
    saturated: jax.Array


def measure(x: jax.Array, fmt: Format, scale: jax.Array) -> Seen:
    """Return the statistics of a tensor that is quantized at ``scale``."""
    largest = amax(x)
    k = exponent_to_fit(largest, fmt) + MAX_EXPONENT
    k = jnp.where(jnp.isfinite(largest), jnp.where(largest > 0, k, -1), _NOT_FINITE)
    beyond = jnp.abs(widen(x)) * (1 / scale) > fmt.max
    return Seen(k, jnp.sum(beyond, dtype=jnp.float32))


def state_gradient(
    state: QuantState | None, seen: tuple[Seen | None, ...], sizes: tuple[int, ...]
) -> QuantState | None:
    """Return the gradient of a matmul's state: this call's tally, and zeros for the rest."""
    if state is None:
        return None
    none = Seen(jnp.int32(-1), jnp.float32(0))
    rows = zip(*(one or none for one in seen), strict=True)
    bins, saturated = (jnp.stack(row)[:, None] for row in rows)
    one_hot = (jnp.arange(_SATURATED)[None] == bins).astype(jnp.float32)
    elements = np.array([0 if s is None else n for s, n in zip(seen, sizes, strict=True)])
    columns = [one_hot, saturated, jnp.asarray(elements[:, None], jnp.float32)]
    tally = jnp.concatenate(columns, axis=1)
    return dataclasses.replace(jax.tree.map(jnp.zeros_like, state), tally=tally)


def check_state(owner: str, config: MatmulConfig | None, state: QuantState | None) -> None:
    """Raise if the strategy needs a state and has none, or if the state does not fit the matmul."""
    if config is not None and not isinstance(config, MatmulConfig):
        raise TypeError(
            f"unitscale.quant.{owner}: config must be a quant.MatmulConfig; got {config!r}. "
            "MatmulConfig() quantizes to E4M3 without scales"
        )
    strategy = None if config is None else config.strategy
    if state is None:
        if strategy is not None and is_stateful(strategy):
            raise ValueError(
                f"unitscale.quant.{owner}: {strategy!r} keeps its scales in a state; give "
                "state=QuantState.create(strategy), or use a layer or nn.DotGeneral, which hold one"
            )
    elif not isinstance(state, QuantState):
        raise TypeError(
            f"unitscale.quant.{owner}: state must be a QuantState; got {type(state).__name__}. "
            "Load the state of a model that was converted with the same rules"
        )
    elif strategy is None:
        raise ValueError(
            f"unitscale.quant.{owner}: state needs config, the MatmulConfig with the strategy "
            f"{state.strategy!r}; got config None"
        )
    elif state.strategy != strategy:
        raise ValueError(
            f"unitscale.quant.{owner}: state must be made for the strategy {strategy!r}; got one "
            f"made for {state.strategy!r}"
        )
    elif (shape := jnp.shape(state.scale)) != (len(TENSORS),):
        raise ValueError(
            f"unitscale.quant.{owner}: state.scale must have shape (3,), the scales of one matmul; "
            f"got {shape}. Scan or vmap over stacked layers, so that each layer gets its own scales"
        )


class StaleScalesWarning(UserWarning):
    """Delayed scales are not updated: a loss was differentiated, but not with respect to them."""


def warn_if_not_updated(operands: Any, state: QuantState | None) -> Any:
    """Return the operands; warn if JAX differentiates them but not their delayed scales."""
    if state is None or not isinstance(state.strategy, Delayed):
        return operands
    return _warn(operands, state.tally)


@jax.custom_vjp
def _warn(operands: Any, _: jax.Array) -> Any:
    return operands


def _warn_fwd(operands: Any, tally: Any) -> Any:
    if any(x.perturbed for x in jax.tree.leaves(operands)) and not tally.perturbed:
        frame, level = sys._getframe(), 1
        while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _LIBRARIES:
            frame, level = frame.f_back, level + 1
        warnings.warn(
            "unitscale: delayed FP8 scales are not being updated, because a loss was "
            "differentiated with respect to the operands of a matmul, but not its scales. "
            "Differentiate models with unitscale.nn.value_and_grad (nnx.value_and_grad does not "
            "record amax). Differentiate functions of a QuantState with respect to the state, too. "
            "A DotGeneral that a layer creates in each call (qkv_dot_general_cls=) keeps no "
            "scales: use unitscale.nn.convert.",
            StaleScalesWarning,
            stacklevel=level,
        )
    return jax.tree.map(lambda x: x.value, operands), None


def _warn_bwd(_: None, cotangents: Any) -> Any:
    return jax.tree.map(lambda x: None if isinstance(x, SymbolicZero) else x, cotangents), None


_warn.defvjp(_warn_fwd, _warn_bwd, symbolic_zeros=True)


def _to_bytes(aux: Any) -> bytes:
    strategy, calibrating = aux
    return to_json([type(strategy).__name__, dataclasses.asdict(strategy), calibrating])


def _from_bytes(written: bytes) -> Any:
    name, fields, calibrating = from_json(written)
    return (Delayed if name == "Delayed" else Static)(**fields), calibrating


# Lets `jax.export` serialize programs that take or return a state.
export.register_pytree_node_serialization(
    QuantState,
    serialized_name="unitscale.quant.QuantState",
    serialize_auxdata=_to_bytes,
    deserialize_auxdata=_from_bytes,
)

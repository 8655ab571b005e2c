"""State of FP8 scales in NNX models, modules for Flax's matmul hooks, and the overflow monitor."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..core import MAX_EXPONENT
from ..quant import (
    TENSORS,
    MatmulConfig,
    QuantState,
    dot_general,
    einsum,
    is_stateful,
)
from ._params import read


class AmaxState(nnx.Variable):
    """The variable that holds the `QuantState` of one matmul.

    It is not an `nnx.Param`, so optimizers, clipping and weight decay ignore it.
    """


def amax_state(config: MatmulConfig | None) -> AmaxState | None:
    """Return a new `AmaxState` for a strategy that keeps scales, else None."""
    if config is None or not is_stateful(config.strategy):
        return None
    return AmaxState(QuantState.create(config.strategy))


class DotGeneral(nnx.Module):
    """A quantized `lax.dot_general` that holds its own scales.

    Pass a separate instance to each layer as ``dot_general=``. The layer then holds the scales of
    `Delayed` or `Static`, and `value_and_grad` updates them. ``precision`` is ignored.

    Example:
        >>> from unitscale.quant import Delayed
        >>> dot = DotGeneral(MatmulConfig(strategy=Delayed()))
        >>> layer = nnx.Linear(8, 4, dot_general=dot, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 8))).shape
        (2, 4)
    """

    _matmul = staticmethod(dot_general)

    def __init__(self, config: MatmulConfig) -> None:
        self.config = config
        self.state = nnx.data(amax_state(config))

    def __call__(self, *operands: Any, **options: Any) -> jax.Array:
        """Multiply; takes the arguments of the function that this module replaces."""
        return self._matmul(self.config, read(self.state))(*operands, **options)


class EinsumOp(DotGeneral):
    """A quantized `jnp.einsum` of two operands: `DotGeneral` for Flax's ``einsum_op=``."""

    _matmul = staticmethod(einsum)


def amax_states(model: Any) -> Iterator[tuple[str, AmaxState]]:
    """Yield the dotted path and the variable of every `AmaxState` of a model."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, AmaxState):
            yield ".".join(map(str, path)), node


def advance(model: Any) -> None:
    """End an optimizer step: update the scales of a model in place (`QuantState.advance`).

    For gradient accumulation: call `value_and_grad` with ``advance=False`` on each micro-batch,
    and `advance` once per step, before or after the optimizer's update.
    """
    map_states(model, QuantState.advance)


def map_states(model: Any, f: Callable[[QuantState], QuantState]) -> None:
    """Update all states in one compiled program instead of many small ones per state."""
    if variables := [variable for _, variable in amax_states(model)]:
        states = _map(f, [variable.get_value() for variable in variables])
        for variable, state in zip(variables, states, strict=True):
            variable.set_value(state)


_map = jax.jit(lambda f, states: list(map(f, states)), static_argnums=0)


class Overflow(NamedTuple):
    """The saturation counts of one quantized tensor: see `OverflowMonitor.read`."""

    layer: str
    tensor: str
    scale: float
    saturated: int
    elements: int
    steps_saturated: int
    steps_not_finite: int

    @property
    def share(self) -> float:
        """The share of elements that saturated in the last step."""
        return self.saturated / self.elements if self.elements else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverflowMonitor:
    """Count how many elements of a model's quantized tensors saturate, and adjust their scales.

    `value_and_grad` records the counts for strategies with state. `Unit` has none: use ``Static()``
    without calibration, which gives the same results. `rebalance` changes the scale of a tensor if
    its share of saturated elements is above ``limit``. Reading waits for the device.

    Example:
        >>> from unitscale.nn import value_and_grad
        >>> from unitscale.quant import Static
        >>> dot = DotGeneral(MatmulConfig(strategy=Static()))
        >>> model = nnx.Linear(8, 4, dot_general=dot, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((2, 8)).at[0, 0].set(1000.0)
        >>> _ = value_and_grad(lambda model: model(x).sum())(model)
        >>> monitor = OverflowMonitor(limit=0.01)
        >>> monitor.read(model)[0].share
        0.0625
        >>> monitor.rebalance(model)[0].scale  # 1000 would need a scale of 4
        2.0
    """

    limit: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.limit < 1:
            raise ValueError(
                "unitscale.nn.OverflowMonitor: limit must be a share from 0 to less than 1; "
                f"got {self.limit!r}"
            )

    def read(self, model: Any) -> list[Overflow]:
        """Return one entry for each quantized tensor of a model, layer by layer.

        Counts cover the last step: all uses of a layer, and all layers of a scan. Fields named
        ``steps_...`` count from the start of training.
        """
        found = []
        for path, variable in amax_states(model):
            state = jax.device_get(variable.get_value())
            for row, tensor in enumerate(TENSORS):
                counts = np.asarray(state.counts)[..., row, :].reshape(-1, 4).sum(0)
                saturated, elements, not_finite, steps = (round(float(n)) for n in counts)
                scale = float(np.max(np.asarray(state.scale)[..., row]))
                found.append(Overflow(path, tensor, scale, saturated, elements, steps, not_finite))
        return found

    def rebalance(self, model: Any, factor: float = 2.0) -> list[Overflow]:
        """Multiply the scale of every tensor above the limit by a power of two, in place.

        The model computes the same values, except that fewer saturate. `Delayed` recomputes its
        scales at the next step. Each layer of a stack is compared with the limit. Returns the
        entries of `read` of tensors, or stacks of them, that were above it, with new scales.

        Raises:
            ValueError: if the factor is not a power of two.
        """
        if not factor > 0 or np.frexp(factor)[0] != 0.5:
            raise ValueError(
                "unitscale.nn.OverflowMonitor.rebalance: factor must be a power of two, so that "
                f"nothing is rounded; got {factor!r}"
            )
        found = set()
        for path, variable in amax_states(model):
            state = variable.get_value()
            above = state.counts[..., 0] > self.limit * state.counts[..., 1]
            scale = state.scale * factor
            in_range = (scale >= 2.0**-MAX_EXPONENT) & (scale <= 2.0**MAX_EXPONENT)
            scale = jnp.where(above & in_range, scale, state.scale)
            variable.set_value(dataclasses.replace(state, scale=scale))
            for row in np.asarray(above).reshape(-1, len(TENSORS)):
                found |= {(path, tensor) for tensor, hit in zip(TENSORS, row, strict=True) if hit}
        return [entry for entry in self.read(model) if (entry.layer, entry.tensor) in found]

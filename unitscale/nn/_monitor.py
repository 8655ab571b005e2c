"""Seeing scales that have drifted, and moving them."""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from ..quant import MAX_EXPONENT, TENSORS, QuantState
from ._amax_state import amax_states


class Overflow(NamedTuple):
    """What a model's state says of one tensor: see `OverflowMonitor.read`.

    Example:
        >>> Overflow("head", "lhs", 1.0, 2, 8, steps_saturated=1, steps_not_finite=0).share
        0.25
    """

    layer: str
    tensor: str
    scale: float
    saturated: int
    elements: int
    steps_saturated: int
    steps_not_finite: int

    @property
    def share(self) -> float:
        """Share of the last step's elements that were beyond the largest value."""
        return self.saturated / self.elements if self.elements else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverflowMonitor:
    """Reads from a model how many elements of its quantized tensors saturate.

    The numbers are those that `value_and_grad` records for strategies that keep their scales;
    ``Static()``, before any calibration, is `Unit` with a monitor. Reading waits for the device.

    Attributes:
        limit: share of saturated elements that `rebalance` tolerates.

    Raises:
        ValueError: if the limit is not a share.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from unitscale.nn import DotGeneral, value_and_grad
        >>> from unitscale.quant import MatmulConfig, Static
        >>> dot = DotGeneral(MatmulConfig(strategy=Static()))
        >>> model = nnx.Linear(8, 4, dot_general=dot, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((2, 8)).at[0, 0].set(1000.0)
        >>> _ = value_and_grad(lambda model: model(x).sum())(model)
        >>> monitor = OverflowMonitor(limit=0.01)
        >>> monitor.read(model)[0].share
        0.0625
        >>> monitor.rebalance(model)[0].scale  # 1000 needs 4: two more steps
        2.0
    """

    limit: float = 1e-4

    def __post_init__(self) -> None:
        if not 0 <= self.limit < 1:
            raise ValueError(
                "unitscale.nn.OverflowMonitor: limit must be a share, 0 or more and below 1; "
                f"got {self.limit!r}"
            )

    def read(self, model: Any) -> list[Overflow]:
        """Returns one entry for each quantized tensor of a model, layer by layer.

        Counts are those of the last step that was advanced, over all uses of the layer (over all
        layers, where a scan stacks them); ``steps_...`` count from the beginning.
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
        """Multiplies the scale of every tensor above the limit by a power of two, in place.

        The values that the model computes stay the same, except that less of them saturate: the
        scale moves from quantized data to the product, exactly. `Delayed` scales move again by
        themselves at the next step.

        Args:
            model: NNX module.
            factor: the power of two.

        Returns:
            The entries of `read` that were above the limit, with their new scales.

        Raises:
            ValueError: if the factor is not a power of two.
        """
        if not factor > 0 or np.frexp(factor)[0] != 0.5:
            raise ValueError(
                "unitscale.nn.OverflowMonitor.rebalance: factor must be a power of two, so that "
                f"nothing is rounded; got {factor!r}"
            )
        for _, variable in amax_states(model):
            variable.set_value(self._moved(variable.get_value(), factor))
        return [entry for entry in self.read(model) if entry.share > self.limit]

    def _moved(self, state: QuantState, factor: float) -> QuantState:
        above = state.counts[..., 0] > self.limit * state.counts[..., 1]
        scale = state.scale * factor
        inside = (scale >= 2.0**-MAX_EXPONENT) & (scale <= 2.0**MAX_EXPONENT)
        scale = jax.numpy.where(above & inside, scale, state.scale)
        return dataclasses.replace(state, scale=scale)

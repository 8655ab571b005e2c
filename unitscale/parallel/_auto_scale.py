"""FP8-LM's automatic scaling: a factor per tensor, adjusted to the share of saturated entries."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

from ..core import CastRounding, from_json, is_scaled, to_json
from ._collectives import AxisName, exchange

# Smallest mu; lower ones would only lose precision.
_SMALLEST = 2.0**-8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoScale:
    """The factor mu of `all_reduce` for each tensor: it halves on overflow and recovers slowly.

    Scaling:
        mu <- mu / 2 (at least 2^-8) after a step in which a share of more than ``threshold`` of a
        tensor's entries, over all devices, is beyond the range of the format, or any is not finite;
        else mu <- min(mu 2^(1/recovery), largest).

        Sums are computed in float32 here, so mu = 1 never overflows. While few entries saturate, mu
        grows above 1: a few outliers then saturate, and other entries are rounded more precisely.

    Attributes:
        mu: tree of float32 scalars with the structure of the gradients.
        threshold: share of entries that may saturate.
        recovery: number of steps without overflow in which mu doubles.
        largest: upper bound of mu.

    Example:
        >>> auto = AutoScale.create({"w": jnp.zeros((64, 64))})
        >>> print(auto.updated({"w": 0.5}).mu["w"], auto.updated({"w": 0.0}, steps=1000).mu["w"])
        0.5 2.0

    References:
        Peng et al., "FP8-LM", 2023, arXiv 2310.18313, section 2.1 (threshold 0.001%, doubling over
        1000 steps).
    """

    mu: Any
    threshold: float = dataclasses.field(default=1e-5, metadata={"static": True})
    recovery: int = dataclasses.field(default=1000, metadata={"static": True})
    largest: float = dataclasses.field(default=2.0**8, metadata={"static": True})

    @classmethod
    def create(
        cls, grads: Any, *, threshold: float = 1e-5, recovery: int = 1000, largest: float = 2.0**8
    ) -> "AutoScale":
        """Return the state before the first step, with mu = 1.

        Args:
            grads: tree with the structure of the gradients, such as the parameters.
            threshold: in [0, 1).
            recovery: positive.
            largest: at least 1; with 1, mu never makes entries saturate.

        Raises:
            ValueError: if a number is out of range.
        """
        if not (0 <= threshold < 1 and recovery > 0 and 1 <= largest < float("inf")):
            raise ValueError(
                "unitscale.parallel.AutoScale.create: expected 0 <= threshold < 1, recovery > 0 "
                f"and 1 <= largest < inf; got threshold {threshold}, recovery {recovery}, largest "
                f"{largest}"
            )
        mu = jax.tree.map(lambda _: jnp.float32(1), grads, is_leaf=is_scaled)
        return cls(mu=mu, threshold=threshold, recovery=recovery, largest=largest)

    def updated(self, saturated: Any, steps: int = 1) -> "AutoScale":
        """Return the state after ``steps`` steps, in each of which these shares saturated."""

        def follow(mu: jax.Array, share: Any) -> jax.Array:
            grown = jnp.minimum(mu * 2.0 ** (steps / self.recovery), self.largest)
            halved = jnp.maximum(mu * 0.5**steps, _SMALLEST)
            return jnp.where(share > self.threshold, halved, grown)

        return dataclasses.replace(self, mu=jax.tree.map(follow, self.mu, saturated))

    def all_reduce(
        self,
        grads: Any,
        axis_name: AxisName,
        dtype: Any = jnp.float8_e4m3fn,
        *,
        rounding: CastRounding = "nearest",
        key: jax.Array | None = None,
        small: int = 1024,
        small_dtype: Any = jnp.float32,
    ) -> tuple[Any, "AutoScale"]:
        """Run `all_reduce` with this mu; return the means, and the state for the next step."""
        where = "AutoScale.all_reduce"
        means, saturated = exchange(
            where, grads, self.mu, axis_name, dtype, rounding, key, small, small_dtype, count=True
        )
        return means, self.updated(jax.tree.unflatten(jax.tree.structure(self.mu), saturated))


export.register_pytree_node_serialization(
    AutoScale,
    serialized_name="unitscale.parallel.AutoScale",
    serialize_auxdata=to_json,
    deserialize_auxdata=from_json,
)

"""Which devices have which tokens and experts."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..core import narrow, varying, widen
from ..quant import QuantState


def rows_of(x: jax.Array) -> jax.Array:
    """Returns (tokens, features) of (..., features).

    Explicit axes go on dividing the first dimension alone: that is all a matrix's type can say.

    Example:
        >>> rows_of(jnp.ones((2, 3, 4))).shape
        (6, 4)
    """
    own = jax.typeof(x).sharding
    kept = own.spec[:1] if x.ndim > 1 else ()
    if any(own.spec[len(kept) :]):
        x = jax.sharding.reshard(x, NamedSharding(own.mesh, PartitionSpec(*kept)))
    return x.reshape(-1, x.shape[-1])


def divided_as(y: jax.Array, x: jax.Array) -> jax.Array:
    """Returns (..., out) with its tokens where those of ``x``, (..., in), lie on explicit axes.

    Example:
        >>> divided_as(jnp.ones((2, 4)), jnp.ones((2, 3))).shape
        (2, 4)
    """
    own = jax.typeof(x).sharding
    spec = PartitionSpec(*own.spec[:-1], None)
    return y if not any(spec) else jax.sharding.reshard(y, NamedSharding(own.mesh, spec))


@dataclasses.dataclass(frozen=True)
class Places:
    """The devices of a mixture, experts divided over an axis and tokens over those of their type.

    Attributes:
        axis: name of the mesh axis that divides the experts, if there is one.
        ways: over how many devices it does.
        manual: whether that is a `jax.shard_map` around.
        experts: number of all experts.
        explicit: the axes that are part of types here.
        tokens: those of them that divide the tokens.

    Example:
        >>> Places.of(jnp.ones((2, 3)), "expert", 4).ways
        1
    """

    axis: str
    ways: int
    manual: bool
    experts: int
    explicit: frozenset[str]
    tokens: tuple[str, ...]

    @classmethod
    def of(cls, x: jax.Array, axis: str, experts: int) -> "Places":
        """Returns those of tokens ``x``, (..., features), in the mesh of the context."""
        mesh = jax.sharding.get_abstract_mesh()
        ways = mesh.shape.get(axis, 1)
        if experts % ways:
            raise ValueError(
                f"unitscale.ops.mixture: the {ways} devices of the axis {axis!r} must divide the "
                f"{experts} experts. Change the mesh, or name another axis with expert_axis=."
            )
        manual = axis in mesh.manual_axes
        if manual and ways > 1:
            _check_manual(axis, x)
        first = tuple(jax.typeof(x).sharding.spec[:1]) if x.ndim > 1 else ()
        tokens = tuple(name for name in jax.tree.leaves(first) if name != axis)
        return cls(axis, ways, manual, experts, frozenset(mesh.explicit_axes), tokens)

    def map(self, run: Callable[..., Any], *args: Any) -> tuple[jax.Array, Any]:
        """Returns ``run(x, scale, gates, chosen, params)``, each device computing what is its own.

        Devices that neither tokens nor experts are divided over all compute the same.
        """
        by_expert = {self.axis} if self.ways > 1 and not self.manual else set()
        names = by_expert | self.explicit
        if not names:
            return run(*args)
        rows, whole = PartitionSpec(self.tokens or None), PartitionSpec()
        specs = rows, whole, rows, rows, self._of_parameters(args[-1], divided=bool(by_expert))
        if self.explicit:
            args = jax.tree.map(_laid_out, specs, args)
        return jax.shard_map(run, in_specs=specs, out_specs=(rows, whole), axis_names=names)(*args)

    def _of_parameters(self, params: Any, divided: bool) -> Any:
        """Arrays with a leading dimension of the experts are divided along it, others are whole."""

        def spec(x: Any) -> PartitionSpec:
            own = divided and not isinstance(x, QuantState) and jnp.shape(x)[:1] == (self.experts,)
            return PartitionSpec(self.axis) if own else PartitionSpec()

        return jax.tree.map(spec, params, is_leaf=lambda x: isinstance(x, QuantState))

    def own(self, chosen: jax.Array) -> tuple[jax.Array, int]:
        """Returns which of this device's experts were chosen, and how many it has.

        One past the last is written for those of another device.
        """
        count = self.experts // self.ways
        own = chosen - (lax.axis_index(self.axis) * count if self.ways > 1 else 0)
        return jnp.where((own >= 0) & (own < count), own, count), count

    def seen(self, x: jax.Array) -> jax.Array:
        """Returns tokens as this device's experts see them.

        The gradients of all devices add up in float32.
        """
        if self.ways == 1:
            return x
        return lax.pcast(widen(x), self.axis, to="varying").astype(x.dtype)

    def total(self, y: jax.Array, scale: Any, dtype: Any) -> tuple[jax.Array, Any]:
        """Returns the sum of what all devices' experts have given, with the largest scale."""
        if self.ways == 1:
            return y, scale
        if scale is not None:
            own, scale = scale, lax.pmax(scale, self.axis)
            y = y * (own / scale)
        return narrow(lax.psum(y, self.axis), dtype), scale


def _laid_out(spec: PartitionSpec, tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.sharding.reshard(x, spec), tree)


def _check_manual(axis: str, x: jax.Array) -> None:
    if axis not in varying(lax.axis_index(axis)):
        raise ValueError(
            f"unitscale.ops.mixture: inside of jax.shard_map over {axis!r} gradients need "
            "check_vma=True; got False."
        )
    if axis in varying(x):
        raise ValueError(
            f"unitscale.ops.mixture: each device of the axis {axis!r} must see the same tokens; "
            "got tokens that vary over it. Divide the batch over another axis."
        )

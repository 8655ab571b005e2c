"""Dropout layer."""

from collections.abc import Sequence

import jax
from flax import nnx

from .. import ops
from ..core import ScaledArray


class Dropout(nnx.Module):
    """Dropout that keeps unit variance, as `flax.nnx.Dropout`.

    Scaling:
        `ops.dropout`; when deterministic, the expected value of the random case.

    Args:
        rate: probability of zero, in [0, 1).
        broadcast_dims: dimensions along which all elements are dropped together.
        deterministic: default for calls; `model.eval()` and `model.train()` set it.
        rng_collection: name of the stream of ``rngs`` that keys come from.
        rngs: streams of random keys, of which the layer forks that one, or the stream itself.
            Needed unless each call gives ``rngs`` or is deterministic.

    Raises:
        ValueError: if the rate is out of range; when called, if there is no key.

    Example:
        >>> import jax.numpy as jnp
        >>> print(Dropout(0.75, deterministic=True)(jnp.ones(2)).data)
        [0.5 0.5]

    References:
        Srivastava et al., "Dropout", JMLR 2014.
    """

    def __init__(
        self,
        rate: float,
        *,
        broadcast_dims: Sequence[int] = (),
        deterministic: bool = False,
        rng_collection: str = "dropout",
        rngs: nnx.Rngs | nnx.RngStream | None = None,
    ) -> None:
        if not 0 <= rate < 1:
            raise ValueError(f"unitscale.nn.Dropout: rate must be in [0, 1); got {rate!r}")
        self.rate, self.deterministic = rate, deterministic
        self.broadcast_dims, self.rng_collection = tuple(broadcast_dims), rng_collection
        stream = self._stream(None if rate == 0 else rngs)
        self.rngs = nnx.data(None if stream is None else stream.fork())

    def __call__(
        self,
        x: ops.ArrayLike,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> ScaledArray:
        """Drops elements of ``x``; arguments left out take the layer's own."""
        key = self.key(deterministic, rngs)
        return ops.dropout(
            x,
            self.rate,
            key=key,
            deterministic=key is None and self.rate > 0,
            broadcast_dims=self.broadcast_dims,
        )

    def set_view(self, deterministic: bool | None = None) -> None:
        """Takes what `nnx.view` asks of a layer; `nnx.view_info` reads arguments two spaces in.

        Args:
          deterministic: whether nothing is dropped.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _stream(self, rngs: nnx.Rngs | nnx.RngStream | None) -> nnx.RngStream | None:
        return rngs[self.rng_collection] if isinstance(rngs, nnx.Rngs) else rngs

    def key(
        self,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
    ) -> jax.Array | None:
        """Returns the next key, or None if nothing is to be dropped.

        Raises:
            ValueError: if a key is needed and there are no rngs.
        """
        quiet = self.deterministic if deterministic is None else deterministic
        if quiet or self.rate == 0:
            return None
        if isinstance(rngs, jax.Array):
            return rngs
        stream = self.rngs if rngs is None else self._stream(rngs)
        if stream is None:
            raise ValueError(
                "unitscale.nn.Dropout: give rngs= to the constructor or the call, or set "
                "deterministic=True"
            )
        return stream()

"""Dropout layer."""

from flax import nnx

from .. import ops
from ..core import ScaledArray


class Dropout(nnx.Module):
    """Dropout that keeps unit variance, as `flax.nnx.Dropout`.

    Scaling:
        `ops.dropout`; when deterministic, the expected value of the random case.

    Args:
        rate: probability of zero, in [0, 1).
        deterministic: default for calls; `model.eval()` and `model.train()` set it.
        rngs: streams of random keys; the layer forks "dropout". Needed unless each call gives
            ``rngs`` or is deterministic.

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
        self, rate: float, *, deterministic: bool = False, rngs: nnx.Rngs | None = None
    ) -> None:
        if not 0 <= rate < 1:
            raise ValueError(f"unitscale.nn.Dropout: rate must be in [0, 1); got {rate!r}")
        self.rate, self.deterministic = rate, deterministic
        self.rngs = nnx.data(None if rngs is None or rate == 0 else rngs.dropout.fork())

    def __call__(
        self,
        x: ops.ArrayLike,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> ScaledArray:
        """Drops elements of ``x``; arguments left out take the layer's own."""
        key = self.key(deterministic, rngs)
        return ops.dropout(x, self.rate, key=key, deterministic=key is None and self.rate > 0)

    def key(self, deterministic: bool | None = None, rngs: nnx.Rngs | None = None):
        """Returns the next key, or None if nothing is to be dropped.

        Raises:
            ValueError: if a key is needed and there are no rngs.
        """
        quiet = self.deterministic if deterministic is None else deterministic
        if quiet or self.rate == 0:
            return None
        stream = self.rngs if rngs is None else rngs.dropout
        if stream is None:
            raise ValueError(
                "unitscale.nn.Dropout: give rngs= to the constructor or the call, or set "
                "deterministic=True"
            )
        return stream()

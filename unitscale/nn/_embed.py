"""Token and position embeddings."""

from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from .. import ops
from ..core import ScaledArray, match_varying
from ._amax_state import amax_state, read_state
from ._linear import LossOptions
from ._param import (
    NO_METADATA,
    Initializer,
    Metadata,
    padding_of,
    read,
    unit_normal,
    weight,
)
from ._placement import OutSharding, placed
from ._policy import PolicyLike, as_policy


class Embed(nnx.Module):
    """A table of embeddings, as `flax.nnx.Embed`.

    Scaling:
        `ops.embed`: rows of a table from N(0, 1). `attend` is `ops.readout` with the transposed
        table. Where both are used on as many tokens (tied embeddings), the two contributions to
        the table's gradient have the same constant, because
        out^-1/2 * (vocab / tokens)^1/2 == tokens^-1/2; so the sum is a constant times the truth.

    Args:
        num_embeddings: size of the vocabulary.
        features: size of an embedding.
        pad_to_multiple_of: the table gets rows of zeros, up to a multiple of this that matrix
            kernels like, such as 128. They never learn and are no logits; factors are those of the
            vocabulary.
        dtype: compute dtype in place of the policy's; None keeps that.
        param_dtype: dtype of parameters in place of the policy's; None keeps that.
        embedding_init: initializer of the table; factors assume unit variance.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys; parameters draw from "params".
        embedding_metadata: metadata of the table, such as ``{"out_sharding": ("model", None)}``.

    Raises:
        ValueError: if the policy is unknown or the multiple not positive.
        TypeError: when called, if ids are not integers.

    Example:
        >>> table = Embed(100, 16, rngs=nnx.Rngs(0))
        >>> x = table(jnp.array([[1, 2, 3]]))
        >>> x.shape, table.attend(x).shape
        ((1, 3, 16), (1, 3, 100))

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (embedding).
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        pad_to_multiple_of: int = 1,
        dtype: Any = None,
        param_dtype: Any = None,
        embedding_init: Initializer = unit_normal,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
        embedding_metadata: Metadata = NO_METADATA,
    ) -> None:
        self.num_embeddings, self.features = num_embeddings, features
        self.policy = as_policy(policy, dtype=dtype, param_dtype=param_dtype)
        self.embedding = weight(
            rngs,
            (num_embeddings, features),
            self.policy,
            role="embedding",
            fan_in=num_embeddings,
            fan_out=features,
            padding=(padding_of("Embed", num_embeddings, pad_to_multiple_of), 0),
            init=embedding_init,
            metadata=embedding_metadata,
        )
        self.amax = nnx.data(amax_state(self.policy.matmul_for("readout")))

    def __call__(self, ids: jax.Array, out_sharding: OutSharding = None) -> ScaledArray:
        """Maps integer ids (...) to embeddings (..., features), which lie as their ids do."""
        rows = ops.embed(ids, read(self.embedding), vocab=self.num_embeddings)
        return placed(rows.astype(self.policy.compute_dtype), out_sharding)

    def tied(self, ids: jax.Array) -> tuple[ScaledArray, "TiedReadout"]:
        """The embeddings of ids, and the readout that is tied to them.

        As calling the layer, and `attend` or `cross_entropy` later, with one thing less: the
        gradient of the rows is added into that of the readout, where it lies (`ops.tied_embed`).

        Example:
            >>> x, readout = Embed(100, 16, rngs=nnx.Rngs(0)).tied(jnp.array([[1, 2, 3]]))
            >>> readout.cross_entropy(x, jnp.array([[2, 3, 4]])).shape
            ()
        """
        rows, table = ops.tied_embed(ids, read(self.embedding), vocab=self.num_embeddings)
        return rows.astype(self.policy.compute_dtype), TiedReadout(self, table)

    def attend(self, x: ops.ArrayLike, out_sharding: OutSharding = None) -> ScaledArray:
        """Maps (..., features) to logits (..., num_embeddings) with the transposed table."""
        return self._readout.attend(x, out_sharding)

    def cross_entropy(
        self, x: ops.ArrayLike, labels: jax.Array, **options: Unpack[LossOptions]
    ) -> jax.Array:
        """The loss of labels (...) under `attend` of (..., features): no logits are ever whole.

        As `ops.readout_cross_entropy`, with its options ``mult``, ``where``, ``reduction`` and
        ``chunk_size``.

        Example:
            >>> table = Embed(100, 16, rngs=nnx.Rngs(0))
            >>> table.cross_entropy(jnp.ones((2, 3, 16)), jnp.zeros((2, 3), int)).shape
            ()
        """
        return self._readout.cross_entropy(x, labels, **options)

    @property
    def _readout(self) -> "TiedReadout":
        return TiedReadout(self, read(self.embedding))


class TiedReadout(NamedTuple):
    """The table of an `Embed` as a readout, for one call of the model: see `Embed.tied`.

    Attributes:
        embed: the layer.
        table: its table.

    Example:
        >>> x, readout = Embed(100, 16, rngs=nnx.Rngs(0)).tied(jnp.array([[1, 2, 3]]))
        >>> readout.attend(x).shape
        (1, 3, 100)
    """

    embed: Embed
    table: ops.ArrayLike

    def attend(self, x: ops.ArrayLike, out_sharding: OutSharding = None) -> ScaledArray:
        """As `Embed.attend`."""
        own = self.embed
        y = ops.readout(
            own.policy.activation(x),
            own.policy.weight(self.table[: own.num_embeddings], "readout").T,
            config=own.policy.matmul_for("readout"),
            state=read_state(own.amax),
        )
        return placed(y, out_sharding)

    def cross_entropy(
        self, x: ops.ArrayLike, labels: jax.Array, **options: Unpack[LossOptions]
    ) -> jax.Array:
        """As `Embed.cross_entropy`."""
        own = self.embed
        kernel, formats = own.policy.in_loss(self.table)
        return ops.readout_cross_entropy(
            own.policy.activation(x),
            kernel,
            labels,
            transposed=True,
            vocab=own.num_embeddings,
            state=read_state(own.amax),
            **formats,
            **options,
        )


class PositionalEmbed(nnx.Module):
    """Learned embeddings of positions, added to the input.

    Scaling:
        y = (x + table[positions]) / 2^1/2 (`ops.weighted_add`, backward the true derivative), so
        that the sum is unit; the table is from N(0, 1) and its gradient, a sum over the tokens at
        a position, has factor (length / tokens)^1/2 as that of `ops.embed`.

    Args:
        max_length: number of positions.
        features: size of an embedding.
        dtype: compute dtype in place of the policy's; None keeps that.
        param_dtype: dtype of parameters in place of the policy's; None keeps that.
        embedding_init: initializer of the table; factors assume unit variance.
        policy: formats; a `Policy` or the name of a preset.
        rngs: streams of random keys; parameters draw from "params".
        embedding_metadata: metadata of the table, such as ``{"out_sharding": ("model", None)}``.

    Raises:
        ValueError: when called, if positions beyond max_length would be needed.

    Example:
        >>> layer = PositionalEmbed(8, 16, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 5, 16))).shape
        (2, 5, 16)

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops (embedding).
    """

    def __init__(
        self,
        max_length: int,
        features: int,
        *,
        dtype: Any = None,
        param_dtype: Any = None,
        embedding_init: Initializer = unit_normal,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
        embedding_metadata: Metadata = NO_METADATA,
    ) -> None:
        self.max_length, self.features = max_length, features
        self.policy = as_policy(policy, dtype=dtype, param_dtype=param_dtype)
        self.embedding = weight(
            rngs,
            (max_length, features),
            self.policy,
            role="embedding",
            fan_in=max_length,
            fan_out=features,
            init=embedding_init,
            metadata=embedding_metadata,
        )

    def __call__(self, x: ops.ArrayLike, positions: jax.Array | None = None) -> ScaledArray:
        """Adds embeddings to (batch, time, features); positions (time,) or (batch, time)."""
        x = self.policy.activation(x)
        batch, time = x.shape[:2]
        if positions is None:
            if time > self.max_length:
                raise ValueError(
                    "unitscale.nn.PositionalEmbed: the sequence must fit max_length "
                    f"{self.max_length}; got {time} positions"
                )
            positions = jnp.arange(time)
        # Inside shard_map positions are those of this part of the batch, as the input is.
        _, ids = match_varying((x, jnp.broadcast_to(positions, (batch, time))))
        rows = ops.embed(ids, read(self.embedding)).astype(self.policy.compute_dtype)
        return ops.weighted_add(x, rows)

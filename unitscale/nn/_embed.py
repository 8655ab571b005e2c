"""Token and position embeddings."""

from typing import Any, NamedTuple, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from .. import ops
from ..core import ScaledArray, match_varying
from ._amax import amax_state
from ._linear import LossOptions
from ._params import (
    NO_METADATA,
    Initializer,
    Metadata,
    OutSharding,
    padding_of,
    read,
    reshard_output,
    unit_normal,
    weight,
)
from ._policy import PolicyLike, as_policy


class TableOptions(TypedDict, total=False):
    """Keyword arguments of layers with a table: see `unitscale.nn`."""

    dtype: Any
    param_dtype: Any
    embedding_init: Initializer
    policy: PolicyLike
    rngs: Required[nnx.Rngs]
    embedding_metadata: Metadata


class _Table(nnx.Module):
    """Base of layers with an embedding table."""

    def __init__(
        self,
        rows: int,
        features: int,
        *,
        padding: int = 0,
        dtype: Any = None,
        param_dtype: Any = None,
        embedding_init: Initializer = unit_normal,
        policy: PolicyLike = "float32",
        rngs: nnx.Rngs,
        embedding_metadata: Metadata = NO_METADATA,
    ) -> None:
        self.features = features
        self.policy = as_policy(policy, dtype=dtype, param_dtype=param_dtype)
        self.embedding = weight(
            rngs,
            (rows, features),
            self.policy,
            role="embedding",
            fan_in=rows,
            fan_out=features,
            padding=(padding, 0),
            init=embedding_init,
            metadata=embedding_metadata,
        )


class Embed(_Table):
    """An embedding table (`ops.embed`), as `flax.nnx.Embed`.

    `attend` is `ops.readout` with the transposed table. With tied embeddings, lookup and readout
    add to the table's gradient with the same factor if both are applied to the same number of
    tokens: out^-1/2 * (vocab / tokens)^1/2 == tokens^-1/2, as out is the size of the vocabulary.

    Args:
        num_embeddings: size of the vocabulary.
        pad_to_multiple_of: pads the table with rows of zeros up to a multiple that matmul kernels
            prefer, such as 128. These rows are never trained, and produce no logits.

    Example:
        >>> table = Embed(100, 16, rngs=nnx.Rngs(0))
        >>> x = table(jnp.array([[1, 2, 3]]))
        >>> x.shape, table.attend(x).shape
        ((1, 3, 16), (1, 3, 100))
    """

    role = "readout"  # role of the matmul; the role of the table is "embedding"

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        pad_to_multiple_of: int = 1,
        **options: Unpack[TableOptions],
    ) -> None:
        padding = padding_of("Embed", num_embeddings, pad_to_multiple_of)
        super().__init__(num_embeddings, features, padding=padding, **options)
        self.num_embeddings = num_embeddings
        self.amax = nnx.data(amax_state(self.policy.matmul_for("readout")))

    def __call__(self, ids: jax.Array, out_sharding: OutSharding = None) -> ScaledArray:
        """Map integer ids (...) to embeddings (..., features)."""
        table, dtype = read(self.embedding), self.policy.compute_dtype
        rows = ops.embed(ids, table, vocab=self.num_embeddings, dtype=dtype)
        return reshard_output(rows, out_sharding)

    def tied(self, ids: jax.Array) -> tuple[ScaledArray, "TiedReadout"]:
        """Return embeddings and the readout that is tied to them.

        Equivalent to calling the layer, and `attend` or `cross_entropy` later, but the gradient of
        the embeddings is accumulated in place into the readout's (`ops.tied_embed`).
        """
        table, dtype = read(self.embedding), self.policy.compute_dtype
        rows, table = ops.tied_embed(ids, table, vocab=self.num_embeddings, dtype=dtype)
        return rows, TiedReadout(self, table)

    def attend(self, x: ops.ArrayLike, out_sharding: OutSharding = None) -> ScaledArray:
        """Map (..., features) to logits (..., num_embeddings) with the transposed table."""
        return TiedReadout(self, read(self.embedding)).attend(x, out_sharding)

    def cross_entropy(
        self, x: ops.ArrayLike, labels: jax.Array, **options: Unpack[LossOptions]
    ) -> jax.Array:
        """Return the cross-entropy of labels (...) from `attend`: see `Readout.cross_entropy`."""
        return TiedReadout(self, read(self.embedding)).cross_entropy(x, labels, **options)


class TiedReadout(NamedTuple):
    """The readout that `Embed.tied` returns, for one call of the model."""

    embed: Embed
    table: ops.ArrayLike

    def attend(self, x: ops.ArrayLike, out_sharding: OutSharding = None) -> ScaledArray:
        """Compute logits, as `Embed.attend`."""
        layer = self.embed
        table = self.table[: layer.num_embeddings]
        x, table, config = layer.policy.operands(x, table, "readout")
        y = ops.readout(x, table.T, config=config, state=read(layer.amax))
        return reshard_output(y, out_sharding)

    def cross_entropy(
        self, x: ops.ArrayLike, labels: jax.Array, **options: Unpack[LossOptions]
    ) -> jax.Array:
        """Compute the loss, as `Embed.cross_entropy`."""
        layer = self.embed
        kernel, formats = layer.policy.in_loss(self.table)
        return ops.readout_cross_entropy(
            layer.policy.activation(x),
            kernel,
            labels,
            transposed=True,
            vocab=layer.num_embeddings,
            state=read(layer.amax),
            **formats,
            **options,
        )


class PositionalEmbed(_Table):
    """Learned position embeddings, added to the input (`ops.weighted_add`, `ops.embed`)."""

    def __init__(self, max_length: int, features: int, **options: Unpack[TableOptions]) -> None:
        super().__init__(max_length, features, **options)
        self.max_length = max_length

    def __call__(self, x: ops.ArrayLike, positions: jax.Array | None = None) -> ScaledArray:
        """Add embeddings to (..., time, features); positions (time,) or (..., time)."""
        x = self.policy.activation(x)
        *batch, time = x.shape[:-1]
        if positions is None:
            if time > self.max_length:
                raise ValueError(
                    "unitscale.nn.PositionalEmbed: the sequence must fit max_length "
                    f"{self.max_length}; got {time} positions"
                )
            positions = jnp.arange(time)
        # Inside shard_map, positions must vary over the same mesh axes as the input.
        _, ids = match_varying((x, jnp.broadcast_to(positions, (*batch, time))))
        rows = ops.embed(ids, read(self.embedding), dtype=self.policy.compute_dtype)
        return ops.weighted_add(x, rows)

"""A vision Transformer in `unitscale.nn`: unit scaled, in any format of a policy."""

import math

import jax
from flax import nnx

from unitscale import ScaledArray, nn, ops

from ..errors import RecipeError
from ..pooling import mean_of_tokens
from .config import ImageModelConfig


class ViT(nnx.Module):
    """Patches as tokens, a Transformer over them, and a readout of their mean."""

    def __init__(
        self,
        shape: ImageModelConfig,
        image: tuple[int, int],
        classes: int,
        *,
        policy: str | nn.Policy,
        rngs: nnx.Rngs,
    ):
        if any(side % shape.patch for side in image):
            raise RecipeError(
                f"model.patch: expected one that divides the images' {image[0]} x {image[1]} "
                f"pixels; got {shape.patch}; change it"
            )
        self.patch, width = shape.patch, shape.width
        tokens = math.prod(image) // shape.patch**2
        self.embed = nn.Dense(shape.patch**2, width, policy=policy, rngs=rngs)
        self.positions = nn.PositionalEmbed(tokens, width, policy=policy, rngs=rngs)
        self.stack = nn.TransformerStack(
            shape.layers,
            width,
            shape.heads,
            shape.hidden,
            norm="layer",
            max_length=tokens,
            policy=policy,
            rngs=rngs,
        )
        self.norm = nn.LayerNorm(width, policy=policy)
        self.readout = nn.Readout(width, classes, policy=policy, rngs=rngs)

    def __call__(self, images: jax.Array, *, deterministic: bool = True) -> ScaledArray:
        """Logits (batch, classes) of images (batch, height, width) of unit size."""
        (batch, height, width), patch = images.shape, self.patch
        x = images.reshape(batch, height // patch, patch, width // patch, patch)
        x = x.swapaxes(2, 3).reshape(batch, -1, patch**2)
        x = self.stack(self.positions(self.embed(x)), deterministic=deterministic)
        return self.readout(self.norm(mean_of_tokens(x)))

    def loss(
        self, images: jax.Array, labels: jax.Array, *, deterministic: bool = True
    ) -> jax.Array:
        """Mean cross entropy of labels (batch,), a float32 scalar in nats per image."""
        return ops.softmax_cross_entropy(self(images, deterministic=deterministic), labels)

"""What the plain models are made of: layers in one dtype, attention, and products in FP8."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from unitscale import transforms

from ..config import ScalifyConfig


def attend(q: jax.Array, k: jax.Array, v: jax.Array, **mask) -> jax.Array:
    """`jax.nn.dot_product_attention`, in float32 where XLA's CPU backend has no float16 one."""
    if v.dtype == jnp.float16 and jax.default_backend() == "cpu":
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, **mask).astype(jnp.float16)
    return jax.nn.dot_product_attention(q, k, v, **mask)


def make_product(
    scalify: ScalifyConfig | None, product: Callable[..., jax.Array] = jax.lax.dot_general
) -> Callable[..., jax.Array]:
    """A product, its operands and its output's gradient in the formats asked for.

    The casts and rescales are markers: they act under `unitscale.scalify`, and are identities
    outside it.
    """
    if scalify is None or (scalify.products is None and scalify.gradients is None):
        return product

    def narrowed(x, kernel, *args, **options):
        if scalify.products:
            x = transforms.cast_data(x, scalify.products)
            kernel = transforms.cast_data(kernel, scalify.products)
        y = product(x, kernel, *args, **options)
        if scalify.gradients:
            y = transforms.cast_data(y, scalify.gradients, on="backward")
        return y

    return narrowed


class Parts:
    """Makes the pieces that every layer shares, all in one dtype.

    Args:
      config: The shape; its `width`, `norm_eps` and `dropout` are read here.
      dtype: What activations are computed in.
      param_dtype: What parameters are stored in.
      scalify: Formats of products; set `product` to `jax.lax.dot_general` before a readout is made.
      rngs: Streams `params` and `dropout`.
      bias: Whether linear layers have one.
      norm: RMSNorm or LayerNorm.
    """

    def __init__(
        self,
        config: Any,
        dtype,
        param_dtype,
        scalify: ScalifyConfig | None,
        rngs: nnx.Rngs,
        *,
        bias: bool = True,
        norm: str = "layer",
    ):
        self.config, self.bias, self.kind = config, bias, norm
        self.options: Any = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.product = make_product(scalify)

    def linear(
        self, features_in: int, features_out: int, *, stddev: float = 0.02, bias: bool | None = None
    ) -> nnx.Linear:
        return nnx.Linear(
            features_in,
            features_out,
            use_bias=self.bias if bias is None else bias,
            kernel_init=nnx.initializers.normal(stddev),
            dot_general=self.product,
            **self.options,
        )

    def norm(self) -> nnx.RMSNorm | nnx.LayerNorm:
        width, eps = self.config.width, self.config.norm_eps
        options = self.options if eps is None else {**self.options, "epsilon": eps}
        if self.kind == "rms":
            return nnx.RMSNorm(width, **options)
        # The mean of squares less the square of the mean loses its digits where the mean is large.
        return nnx.LayerNorm(width, use_fast_variance=False, **options)

    def embed(self, rows: int) -> nnx.Embed:
        init = nnx.initializers.normal(0.02)
        return nnx.Embed(rows, self.config.width, embedding_init=init, **self.options)

    def dropout(self) -> nnx.Dropout:
        return nnx.Dropout(self.config.dropout, rngs=self.options["rngs"])

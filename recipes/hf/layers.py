"""Building blocks of the plain models: layers, attention and rotary positions."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from unitscale import transforms

from ..config import PrecisionConfig, RopeConfig

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "gelu_new": jax.nn.gelu,
}


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, *, cap: float | None = None, **options
) -> jax.Array:
    """`jax.nn.dot_product_attention`, in float32 where XLA's CPU backend has no float16 one.

    With a `cap`, scores s become cap tanh(s / cap) (Gemma 2); `options` are then mask and scale.
    """
    if v.dtype == jnp.float16 and jax.default_backend() == "cpu":
        wide = (x.astype(jnp.float32) for x in (q, k, v))
        return attend(*wide, cap=cap, **options).astype(jnp.float16)
    if cap is None:
        return jax.nn.dot_product_attention(q, k, v, **options)
    return _attend_capped(q, k, v, cap, **options)


def _attend_capped(q, k, v, cap: float, *, mask: jax.Array, scale: float | None = None):
    """q (batch, time, heads, size), k and v with heads that divide them; mask (..., time, keys)."""
    batch, time, heads, size = q.shape
    grouped = q.reshape(batch, time, k.shape[2], heads // k.shape[2], size)
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32)
    scores = cap * jnp.tanh(scores * ((size**-0.5 if scale is None else scale) / cap))
    scores = jnp.where(mask[:, :, None], scores, 0.5 * jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(q.shape)


def frequencies(size: int, rope: RopeConfig) -> np.ndarray:
    """Return the radians per position of each pair of features of a head, float32 (size / 2,).

    base^(-2 i / size), over `factor` if linear. Those of llama3 depend on how often they turn in
    the context of the first training, turns = context * frequency / (2 pi): kept above high_factor,
    over `factor` below low_factor, and between the two in proportion. Those of yarn are kept above
    `fast` turns, over `factor` below `slow`, and between the two in proportion to i.

    References:
      Su et al., 2021, RoFormer. Grattafiori et al., 2024, The Llama 3 Herd of Models. Peng et al.,
      2023, YaRN, section 3.2; the ends of its band are those of `transformers`.
    """
    pairs = np.arange(size // 2, dtype=np.float64)
    kept = rope.base ** (-2 * pairs / size)
    share = np.ones_like(kept)  # of the frequency as it was
    if rope.scaling == "linear":
        share = np.zeros_like(kept)
    if rope.scaling == "llama3":
        turns = rope.context * kept / (2 * np.pi)
        share = np.clip((turns - rope.low_factor) / (rope.high_factor - rope.low_factor), 0, 1)
    if rope.scaling == "yarn":  # pair i turns context / (2 pi base^(2 i / size)) times
        low, high = (
            size * math.log(rope.context / (turns * 2 * math.pi)) / (2 * math.log(rope.base))
            for turns in (rope.fast, rope.slow)
        )
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        share = 1 - np.clip((pairs - low) / (high - low if high != low else 0.001), 0, 1)
    return (kept * (share + (1 - share) / rope.factor)).astype(np.float32)


def rotate(
    x: jax.Array, positions: jax.Array, frequency: np.ndarray, factor: float = 1.0
) -> jax.Array:
    """Rotate x (batch, time, heads, head_dim) at positions (time,), and multiply it by `factor`.

    Feature i and feature i + head_dim / 2 are a pair.
    """
    angle = positions[:, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
    return turned.astype(x.dtype)


def make_product(
    precision: PrecisionConfig | None,
    product: Callable[..., jax.Array] = jax.lax.dot_general,
    gradients: str = "float8_e5m2",
) -> Callable[..., jax.Array]:
    """Wrap a matmul so that under `unitscale.scalify` it is in FP8, if `precision.matmuls` is fp8.

    Operands are cast to E4M3 and cotangents to `gradients`, by markers, which are identities
    outside `scalify`.
    """
    if precision is None or precision.matmuls != "fp8":
        return product

    def narrowed(x, kernel, *args, **options):
        x, kernel = (transforms.cast_data(array, "float8_e4m3fn") for array in (x, kernel))
        y = product(x, kernel, *args, **options)
        return transforms.cast_data(y, gradients, on="backward")

    return narrowed


class OffsetNorm(nnx.Module):
    """x / RMS(x) * (1 + scale), computed in float32 (Gemma)."""

    def __init__(self, width: int, *, epsilon: float = 1e-6, dtype, param_dtype, rngs: nnx.Rngs):
        self.epsilon, self.dtype = epsilon, dtype
        self.scale = nnx.Param(jnp.zeros(width, param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide, scale = x.astype(jnp.float32), self.scale[...].astype(jnp.float32)
        square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        return (wide * jax.lax.rsqrt(square + self.epsilon) * (1 + scale)).astype(self.dtype)


class Parts:
    """Factory of layers in one dtype.

    Args:
      config: The shape; its `width`, `norm_eps` and `dropout` are read here.
      dtype: What activations are computed in.
      param_dtype: What parameters are stored in.
      precision: Formats of matmuls; set `product` to `jax.lax.dot_general` before a readout.
      rngs: Streams `params` and `dropout`.
      norm: "rms", "layer", or "offset" for `OffsetNorm`.
      norm_bias: Whether a LayerNorm adds a bias.
    """

    def __init__(
        self,
        config: Any,
        dtype,
        param_dtype,
        precision: PrecisionConfig | None,
        rngs: nnx.Rngs,
        *,
        norm: str = "layer",
        norm_bias: bool = True,
    ):
        self.config, self.kind, self.norm_bias = config, norm, norm_bias
        self.options: Any = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.product = make_product(precision)

    def linear(
        self, features_in: int, features_out: int, *, stddev: float = 0.02, bias: bool = True
    ) -> nnx.Linear:
        return nnx.Linear(
            features_in,
            features_out,
            use_bias=bias,
            kernel_init=nnx.initializers.normal(stddev),
            dot_general=self.product,
            **self.options,
        )

    def norm(self, width: int | None = None) -> nnx.RMSNorm | nnx.LayerNorm | OffsetNorm:
        """Make a norm, of the model's width by default."""
        width, eps = int(width or self.config.width), self.config.norm_eps
        options = self.options if eps is None else {**self.options, "epsilon": eps}
        if self.kind == "offset":
            return OffsetNorm(width, **options)
        if self.kind == "rms":
            return nnx.RMSNorm(width, **options)
        # The mean of squares less the square of the mean loses its digits where the mean is large.
        return nnx.LayerNorm(width, use_bias=self.norm_bias, use_fast_variance=False, **options)

    def embed(self, rows: int) -> nnx.Embed:
        init = nnx.initializers.normal(0.02)
        return nnx.Embed(rows, self.config.width, embedding_init=init, **self.options)

    def dropout(self) -> nnx.Dropout:
        return nnx.Dropout(self.config.dropout, rngs=self.options["rngs"])

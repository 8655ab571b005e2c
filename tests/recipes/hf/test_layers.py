"""Attention with a cap, and the norms of the Llama family, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.config import DecoderConfig, GPTModelConfig, RopeConfig
from recipes.hf.layers import OffsetNorm, Parts, attend
from recipes.hf.plain import Attention
from recipes.hf.rope import frequencies

TIME, HEADS, GROUPS, SIZE, WIDTH = 7, 4, 2, 6, 10
DRAW = np.random.default_rng(0)


def reference(q, k, v, scale: float, cap: float | None, window: int | None) -> np.ndarray:
    """A query at a time: q (time, heads, size), k and v (time, GROUPS, size)."""
    out = np.zeros(q.shape, np.float64)
    for head in range(q.shape[1]):
        keys, values = (x[:, head // (q.shape[1] // k.shape[1])].astype(np.float64) for x in (k, v))
        for time in range(len(q)):
            first = 0 if window is None else max(0, time - window + 1)
            scores = keys[first : time + 1] @ q[time, head] * scale
            if cap is not None:
                scores = cap * np.tanh(scores / cap)
            weights = np.exp(scores - scores.max())
            out[time, head] = weights / weights.sum() @ values[first : time + 1]
    return out


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_capped_attention(dtype: str) -> None:
    q = DRAW.standard_normal((TIME, HEADS, SIZE)).astype(dtype)
    k, v = DRAW.standard_normal((2, TIME, GROUPS, SIZE)).astype(dtype)
    mask = np.tril(np.ones((TIME, TIME), bool))[None, None]
    batch = [jnp.asarray(x)[None] for x in (q, k, v)]
    found = attend(*batch, cap=0.7, scale=0.9, mask=mask)[0]
    assert found.dtype == dtype
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(found, reference(q, k, v, 0.9, 0.7, None), atol=tolerance)
    own = attend(*batch, cap=0.7, mask=mask)[0]
    np.testing.assert_allclose(own, reference(q, k, v, SIZE**-0.5, 0.7, None), atol=tolerance)
    far = attend(*batch, cap=1e6, mask=mask)
    np.testing.assert_allclose(far, attend(*batch, mask=mask), atol=1e-3)


def root_mean_square(x: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True))


def test_a_norm_with_an_offset() -> None:
    options = {"dtype": jnp.float32, "param_dtype": jnp.float32, "rngs": nnx.Rngs(0)}
    norm = OffsetNorm(WIDTH, epsilon=1e-3, **options)
    x, scale = DRAW.standard_normal((2, 3, WIDTH)), DRAW.standard_normal(WIDTH)
    norm.scale.set_value(jnp.asarray(scale, jnp.float32))
    square = np.mean(np.square(x), axis=-1, keepdims=True)
    found = norm(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(found, x / np.sqrt(square + 1e-3) * (1 + scale), atol=1e-5)


@pytest.mark.parametrize("local", [False, True], ids=["whole", "local"])
@pytest.mark.parametrize("cap", [None, 0.8], ids=["uncapped", "capped"])
def test_an_attention_block(local: bool, cap: float | None) -> None:
    """Grouped queries, norms of queries and keys, rotary positions of its kind, and a window."""
    ropes = RopeConfig(base=30.0), RopeConfig(base=7.0, scaling="linear", factor=2.0)
    decoder = DecoderConfig(
        head_dim=SIZE,
        query_key_norms=True,
        attention_scale=0.6,
        attention_cap=cap,
        window=3,
        local_layers=(1,),
        rope=ropes[0],
        local_rope=ropes[1],
    )
    config = GPTModelConfig(
        width=WIDTH, heads=HEADS // 2, kv_heads=1, library="plain", norm_eps=1e-9, decoder=decoder
    )
    parts = Parts(config, jnp.float32, jnp.float32, None, nnx.Rngs(0), bias=False, norm="rms")
    block = Attention(parts, int(local))
    graphdef, state = nnx.split(block)
    drawn = [DRAW.standard_normal(leaf.shape) for leaf in jax.tree.leaves(state)]
    state = jax.tree.unflatten(
        jax.tree.structure(state), [jnp.asarray(x, jnp.float32) for x in drawn]
    )
    block = nnx.merge(graphdef, state)
    x = DRAW.standard_normal((TIME, WIDTH))
    found, _ = block(jnp.asarray(x, jnp.float32)[None], jnp.arange(TIME))

    def heads(linear, norm) -> np.ndarray:
        y = (x @ np.asarray(linear.kernel[...], np.float64)).reshape(TIME, -1, SIZE)
        if norm is None:
            return y
        y = y / root_mean_square(y) * np.asarray(norm.scale[...], np.float64)
        turn = np.arange(TIME)[:, None, None] * frequencies(SIZE, ropes[local]).astype(np.float64)
        pairs = (y[..., : SIZE // 2] + 1j * y[..., SIZE // 2 :]) * np.exp(1j * turn)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    q, k = heads(block.query, block.query_norm), heads(block.key, block.key_norm)
    mixed = reference(q, k, heads(block.value, None), 0.6, cap, 3 if local else None)
    expected = mixed.reshape(TIME, -1) @ np.asarray(block.out.kernel[...], np.float64)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found[0], expected, atol=2e-5 * np.abs(expected).max())

"""Attention with a cap, norms and rotary positions, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.config import DecoderConfig, GPTModelConfig, RopeConfig
from recipes.hf.layers import OffsetNorm, Parts, attend, frequencies, rotate
from recipes.hf.plain import Attention

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


@pytest.mark.parametrize(("local", "cap"), [(False, None), (True, 0.8)])
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
    parts = Parts(config, jnp.float32, jnp.float32, None, nnx.Rngs(0), norm="rms")
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


LLAMA3 = RopeConfig(base=50.0, scaling="llama3", factor=8.0, context=64)
YARN = RopeConfig(base=50.0, scaling="yarn", factor=8.0, context=64, fast=4.0, attention_factor=1.2)


def llama3(size: int, rope: RopeConfig) -> np.ndarray:
    """By wavelengths, as in the model's published code, a frequency at a time."""
    found = []
    for pair in range(size // 2):
        frequency = 1.0 / rope.base ** (2 * pair / size)
        wavelength = 2 * np.pi / frequency
        if wavelength > rope.context / rope.low_factor:
            frequency /= rope.factor
        elif wavelength >= rope.context / rope.high_factor:
            smooth = rope.context / wavelength - rope.low_factor
            smooth /= rope.high_factor - rope.low_factor
            frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency
        found.append(frequency)
    return np.asarray(found)


def test_frequencies() -> None:
    plain = frequencies(8, RopeConfig(base=16.0))
    np.testing.assert_allclose(plain, [1, 1 / 2, 1 / 4, 1 / 8], rtol=1e-7)
    assert plain.dtype == np.float32
    linear = frequencies(8, RopeConfig(base=16.0, scaling="linear", factor=5.0))
    np.testing.assert_allclose(linear, plain / 5, rtol=1e-6)
    scaled = frequencies(16, LLAMA3)
    np.testing.assert_allclose(scaled, llama3(16, LLAMA3), rtol=1e-6)
    share = scaled / frequencies(16, RopeConfig(base=50.0))
    kept, divided = np.isclose(share, 1), np.isclose(share, 1 / 8)
    bands = kept, divided, ~kept & ~divided
    assert all(band.any() for band in bands)


@pytest.mark.parametrize(("context", "share"), [(6, 1 / 8), (2, 1.0)])
def test_a_band_of_no_width(context: int, share: float) -> None:
    """Of contexts that no pair turns in, as `transformers` has it: the first pair is kept."""
    rope = RopeConfig(base=10.0, scaling="yarn", factor=8.0, context=context)
    found = frequencies(8, rope) / frequencies(8, RopeConfig(base=10.0))
    np.testing.assert_allclose(found, [1, share, share, share], rtol=1e-6)


@pytest.mark.parametrize("rope", [RopeConfig(), LLAMA3, YARN], ids=["plain", "llama3", "yarn"])
def test_rotation_is_a_product_of_complex_numbers(rope: RopeConfig) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((2, 3, 2, 8)).astype(np.float32)
    positions = np.asarray([0, 5, 17])
    turn = frequencies(8, rope).astype(np.float64)
    pairs = x[..., :4].astype(np.float64) + 1j * x[..., 4:]
    factor = rope.attention_factor
    turned = factor * pairs * np.exp(1j * positions[:, None, None] * turn)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    found = rotate(jnp.asarray(x), jnp.asarray(positions), frequencies(8, rope), factor)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    half = rotate(jnp.asarray(x, jnp.float16), jnp.asarray(positions), frequencies(8, rope))
    assert half.dtype == jnp.float16

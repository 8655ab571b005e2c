"""Multi-head attention and its cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.gradients import jit
from tests.refusals import refuses
from unitscale import nn, ops, rules

WIDTH, HEADS, TIME = 16, 4, 6


def attention(**options) -> nn.MultiHeadAttention:
    return nn.MultiHeadAttention(HEADS, WIDTH, **options, rngs=nnx.Rngs(0))


def inputs(time: int = TIME, features: int = WIDTH, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (2, time, features), dtype)


def reference(layer, x, source=None, *, mask=None, kv_heads=HEADS) -> np.ndarray:
    """The layer in float64 NumPy."""
    source = x if source is None else source

    def affine(dense, x):
        kernel = np.asarray(dense.kernel.get_value(), np.float64)
        return np.asarray(x, np.float64) @ kernel / kernel.shape[0] ** 0.5

    def heads(x, count):
        return x.reshape(*x.shape[:-1], count, -1)

    q = heads(affine(layer.query, x), HEADS)
    k, v = (heads(affine(d, source), kv_heads) for d in (layer.key, layer.value))
    k, v = (np.repeat(a, HEADS // kv_heads, axis=2) for a in (k, v))
    logits = np.einsum("bthd,bshd->bhts", q, k) * layer.mult / q.shape[-1]
    allowed = np.ones(logits.shape[-2:], bool) if mask is None else mask
    weights = np.where(allowed, np.exp(logits), 0)
    weights = weights / weights.sum(-1, keepdims=True)
    length = logits.shape[-1] if layer.max_length is None else layer.max_length
    factor = rules.dot_product_attention(
        q.shape[-1], length, is_causal=layer.is_causal, mult=layer.mult
    ).fwd
    y = factor * np.einsum("bhts,bshd->bthd", weights, v)
    return affine(layer.out, y.reshape(*y.shape[:2], -1))


@pytest.mark.parametrize(
    ("batch", "masked"),
    [
        ((3, 2), None),
        ((3, 2), (3, 2, 1, TIME, TIME)),
        ((3, 2), (HEADS, 1, TIME)),
        ((), (HEADS, TIME, TIME)),
    ],
)
def test_any_number_of_batch_axes(batch, masked) -> None:
    """As one sequence at a time."""
    options = {"num_kv_heads": 2, "rotary_base": 100.0, "is_causal": masked is None}
    layer = attention(**options)
    x, source = jax.random.normal(jax.random.key(0), (2, *batch, TIME, WIDTH))
    mask = masked and jax.random.bernoulli(jax.random.key(2), 0.7, masked)
    places = jax.random.randint(jax.random.key(3), (*batch, TIME), 0, 50)
    y = layer(x, source, mask=mask, positions=places)
    assert y.shape == x.shape
    for index in np.ndindex(*batch):
        own = mask if mask is None or mask.ndim < 3 + len(batch) else mask[index]
        alone = layer(x[index], source[index], mask=own, positions=places[index])
        np.testing.assert_allclose(y.value[index], alone.value, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer(x).value, layer(x, x, x).value)


@pytest.mark.parametrize(
    ("options", "kv_heads"),
    [
        ({}, HEADS),
        ({"is_causal": True, "mult": 3.0}, HEADS),
        ({"num_kv_heads": 2, "max_length": 20}, 2),
        ({"num_kv_heads": 1, "is_causal": True, "qkv_features": 32, "out_features": 5}, 1),
    ],
)
def test_self_attention(options, kv_heads) -> None:
    layer, x = attention(**options), inputs()
    mask = np.tril(np.ones((TIME, TIME), bool)) if layer.is_causal else None
    expected = reference(layer, x, mask=mask, kv_heads=kv_heads)
    np.testing.assert_allclose(layer(x).value, expected, rtol=1e-4, atol=1e-4)


def test_cross_attention_and_mask() -> None:
    layer, x, source = attention(in_kv_features=7), inputs(), inputs(9, 7, seed=1)
    mask = np.random.default_rng(0).random((TIME, 9)) < 0.6
    mask[:, 0] = True
    expected = reference(layer, x, source, mask=mask)
    np.testing.assert_allclose(layer(x, source, mask=mask).value, expected, rtol=1e-4, atol=1e-4)
    values = inputs(9, 7, seed=2)
    again = layer(x, source, values, mask=mask).value
    assert not np.allclose(again, expected, atol=0.1)


def test_rotary_positions_are_relative() -> None:
    layer, x = attention(rotary_base=30.0, is_causal=True), inputs()
    plain = layer(x).value
    shifted = layer(x, positions=jnp.arange(TIME) + 11).value
    np.testing.assert_allclose(shifted, plain, rtol=1e-4, atol=1e-4)
    per_item = layer(x, positions=jnp.arange(TIME) + jnp.array([[0], [5]])).value
    np.testing.assert_allclose(per_item, plain, rtol=1e-4, atol=1e-4)
    stretched = layer(x, positions=3 * jnp.arange(TIME)).value
    assert not np.allclose(stretched, plain, atol=1e-2)


def test_causality_through_gradients() -> None:
    """No gradient from a token to a later one; every earlier one has some."""
    layer, x = attention(is_causal=True, rotary_base=30.0), inputs()
    jacobian = jit(jax.jacrev(lambda x: layer(x).value.sum(-1)))(x)
    reach = np.abs(jacobian).sum(-1)[0, :, 0]
    assert (reach[np.triu_indices(TIME, 1)] == 0).all()
    assert (reach[np.tril_indices(TIME)] > 0).all()
    assert np.abs(jacobian).sum(-1)[0, :, 1].max() == 0


CACHED = {
    "plain": {},
    "rope": {"rotary_base": 30.0},
    "grouped": {"num_kv_heads": 2, "rotary_base": 30.0, "mult": 2.0},
}


@pytest.mark.parametrize(
    ("name", "policy"), [("plain", "float32"), ("rope", "float32"), ("grouped", "float16")]
)
def test_a_cache_gives_what_the_uncached_layer_gives(name, policy) -> None:
    layer = attention(is_causal=True, max_length=TIME, policy=policy, **CACHED[name])
    x = inputs()
    uncached = np.asarray(jit(lambda x: layer(x).value)(x), np.float64)
    # A longer cache than the sequence: unwritten slots are not attended to.
    for chunks in ((1,) * TIME, (3, 1, 2)):
        step = jit(lambda x, cache: layer.decode(x, cache))
        cache, start, parts = layer.init_cache(2, 9), 0, []
        for size in chunks:
            y, cache = step(x[:, start : start + size], cache)
            parts.append(np.asarray(y.value, np.float64))
            start += size
        assert int(cache.length) == TIME
        assert cache.key.dtype == layer.policy.compute_dtype
        # Both compute in float32 and round a few times to the policy's type.
        tolerance = 16 * float(jnp.finfo(policy).eps)
        np.testing.assert_allclose(
            np.concatenate(parts, 1), uncached, rtol=tolerance, atol=4 * tolerance
        )


def test_a_full_cache_gives_nan_and_not_wrong_tokens() -> None:
    layer, x = attention(is_causal=True, max_length=TIME), inputs()
    cache = layer.init_cache(2, 4)
    y, cache = layer.decode(x[:, :3], cache)
    assert np.isfinite(y.value).all()
    y, _ = layer.decode(x[:, 3:5], cache)
    assert np.isnan(y.value).all()


def test_the_implementation_is_that_of_calls_and_not_of_decoding() -> None:
    """A cache comes with a mask, which a kernel that was asked for may not take."""
    layer = attention(is_causal=True, max_length=8, implementation="chunked")
    with ops.attention_paths() as taken:
        jax.eval_shape(layer, inputs())
        jax.eval_shape(lambda x: layer.decode(x, layer.init_cache(2, 8)), inputs())
    assert [path.implementation for path in taken] == ["chunked", "plain"]


def test_dropout_on_the_weights_and_its_keys() -> None:
    rngs = nnx.Rngs(params=0, dropout=1)
    layer, other = (
        nn.MultiHeadAttention(
            HEADS, WIDTH, dropout_rate=0.5, rngs=nnx.Rngs(params=0, dropout=1), keep_rngs=keep
        )
        for keep in (True, False)
    )
    x, key = inputs(), rngs.dropout()
    first, quiet = layer(x).value, layer(x, deterministic=True).value
    for different in (layer(x).value, quiet):
        assert not np.array_equal(first, different)
    layer.eval()
    np.testing.assert_array_equal(layer(x).value, quiet)
    layer.train()
    assert not np.array_equal(layer(x).value, quiet)
    assert not jax.tree.leaves(nnx.state(other, nnx.RngState))
    np.testing.assert_array_equal(other(x, rngs=key).value, layer(x, rngs=key).value)
    with pytest.raises(ValueError, match="give rngs="):
        other(x)


CAUSAL = {"is_causal": True, "max_length": 9}
test_errors = refuses(
    [
        (ValueError, call, match)
        for call, match in (
            (lambda: attention(qkv_features=18), "num_heads must divide qkv_features"),
            (lambda: attention(decode=True), "decode and broadcast_dropout must be False"),
            (lambda: attention(broadcast_dropout=True), "broadcast_dropout must be False"),
            (lambda: attention(num_kv_heads=3), "num_kv_heads must divide num_heads"),
            (lambda: attention(qkv_features=12, rotary_base=10.0), "need an even head size"),
            (lambda: attention(implementation="flash"), "implementation must be one of auto"),
            (lambda: attention(max_length=9).init_cache(1, 9), "a cache needs is_causal=True"),
            (lambda: attention(is_causal=True).init_cache(1, 9), "a cache needs max_length="),
            (
                lambda: attention().decode(inputs(), attention(**CAUSAL).init_cache(2, 9)),
                "a cache needs is_causal=True",
            ),
            (
                lambda: attention(**CAUSAL).decode(inputs(), attention(**CAUSAL).init_cache(2, 4)),
                "KVCache: expected keys .*'at most 4'",
            ),
            (
                lambda: attention(**CAUSAL).decode(inputs(), attention(**CAUSAL).init_cache(3, 9)),
                r"KVCache: expected keys .*\(3, .*got \(2",
            ),
            (lambda: attention()(inputs(features=9)), "kernel must be"),
        )
    ]
)

"""Attention in chunks and by the plain path, against NumPy in float64; values and gradients."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from unitscale import as_scaled, ops, rules, scalify, to_array
from unitscale.analysis import check_gradients
from unitscale.core import ScaledArray
from unitscale.ops import _attention_kernels as chunked
from unitscale.parallel import make_mesh

from .conformance import TRANSFORMS, assert_close, check, normal, pulled, rounded
from .test_attention import CASES, SLACK, attention

BATCH, TIME, SOURCE, DIM = 2, 11, 6, 4
# Chunks of at most 4 queries and 4 keys: three and two, the last with rows to spare.
CHUNK = 4


def drawn(shape: tuple[int, ...], share: float) -> np.ndarray:
    return np.random.default_rng(len(shape)).random(shape) < share


HIDDEN = drawn((BATCH, 4, TIME, SOURCE), 0.5)
HIDDEN[:, :, 2] = HIDDEN[0, 1, 7:] = False  # rows with nothing to attend to
LATE = HIDDEN.copy()
LATE[:, :, :3, :4] = False  # keys that come later than the query alone
PER_ITEM = np.float32([2, 0.25]).reshape(2, 1, 1, 1)

# Query heads, key heads, mask, causal, scales of q, k and v.
TABLE: dict[str, tuple[int, int, np.ndarray | None, bool, tuple[Any, Any, Any]]] = {
    "full": (4, 4, None, False, (None, None, None)),
    "causal": (4, 4, None, True, (None, None, None)),
    "grouped": (4, 2, None, False, (None, None, None)),
    "grouped causal": (4, 1, None, True, (None, None, None)),
    "mask": (4, 4, HIDDEN, False, (None, None, None)),
    "mask causal": (4, 4, LATE, True, (None, None, None)),
    "mask grouped": (4, 2, HIDDEN, False, (None, None, None)),
    "mask of keys": (4, 2, drawn((BATCH, 1, 1, SOURCE), 0.6), False, (None, None, None)),
    "mask of queries": (4, 2, drawn((1, 1, TIME, 1), 0.6), True, (None, None, None)),
    "mask of heads": (4, 2, drawn((1, 4, 1, SOURCE), 0.6), False, (None, None, None)),
    "scales": (4, 2, HIDDEN, False, (4.0, 0.5, 2.0**10)),
    "scales of items": (4, 2, None, True, (PER_ITEM, np.float32(0.5), PER_ITEM)),
}


def reference(q, k, v, ct, mask, is_causal):
    """Attention and its gradients for a cotangent, by the book."""
    groups = q.shape[2] // k.shape[2]
    wide_k, wide_v = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
    logits = np.einsum("bthd,bshd->bhts", q, wide_k) / DIM
    allowed = np.broadcast_to(True if mask is None else mask, logits.shape)
    if is_causal:
        allowed = allowed & np.tril(np.ones(logits.shape[-2:], bool))
    nothing = ~allowed.any(-1, keepdims=True)
    weights = np.where(allowed, np.exp(logits - logits.max(-1, keepdims=True)), 0) + nothing
    weights /= weights.sum(-1, keepdims=True)
    by_weights = np.einsum("bthd,bshd->bhts", ct, wide_v)
    mean = (weights * by_weights).sum(-1, keepdims=True)
    by_logits = weights * (by_weights - mean) * allowed / DIM
    dk, dv = (
        np.einsum("bhts,bthd->bshd", a, b).reshape(*k.shape[:3], groups, DIM).sum(3)
        for a, b in ((by_logits, q), (weights, ct))
    )
    dq = np.einsum("bhts,bshd->bthd", by_logits, wide_k)
    return np.einsum("bhts,bshd->bthd", weights, wide_v), dq, dk, dv


def arguments(name: str, dtype: str) -> tuple[np.ndarray, ...]:
    heads, kv_heads = TABLE[name][:2]
    kv = (BATCH, SOURCE, kv_heads, DIM)
    q = (BATCH, TIME, heads, DIM)
    return tuple(rounded(a, dtype) for a in normal(name, q, kv, kv, q))


def program(implementation: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Values and gradients of the whole table."""
    results = {}
    for name, (q, k, v, ct) in arguments.items():
        *_, mask, is_causal, scales = TABLE[name]

        def f(q, k, v, mask=mask, is_causal=is_causal, scales=scales):
            scaled = [
                x if s is None else ScaledArray(x, s)
                for x, s in zip((q, k, v), scales, strict=True)
            ]
            options = {"mask": mask, "is_causal": is_causal, "implementation": implementation}
            return ops.dot_product_attention(*scaled, **options).data

        y, vjp = jax.vjp(f, q, k, v)
        results[name] = (y, *vjp(ct))
    return results


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_CHUNK", {"cpu": CHUNK})


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("implementation", ["plain", "chunked"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_values_and_gradients(implementation: str, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"):
        given = {name: arguments(name, dtype) for name in TABLE}
        typed = {n: tuple(jnp.asarray(a, dtype) for a in arrays) for n, arrays in given.items()}
        found = jax.jit(functools.partial(program, implementation))(typed)
        found = jax.tree.map(lambda x: (np.asarray(x).astype(np.float64), x.dtype), found)
    for name, (q, k, v, ct) in given.items():
        *_, mask, is_causal, (qs, ks, _) = TABLE[name]
        logit_scale = np.float64(1 if qs is None else qs) * np.float64(1 if ks is None else ks)
        fwd = rules.dot_product_attention(DIM, SOURCE, is_causal=is_causal).fwd
        y, dq, dk, dv = reference(q * logit_scale, k, v, ct, mask, is_causal)
        # Gradients are those of data: of q and k before their scales.
        wanted = (y, dq * logit_scale, dk, dv)
        for what, (got, kind), want in zip(["y", "q", "k", "v"], found[name], wanted, strict=True):
            assert kind == dtype
            slack = SLACK.get(dtype, 1)
            assert_close(got, fwd * want, dtype, f"{what} of {name}", slack)


@pytest.mark.parametrize("name", ["mask", "causal mask"])
def test_every_transformation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "_CHUNK", {"cpu": 2})
    shape = (1, 3, 2, 4)
    mult, is_causal = CASES[name]["mult"], CASES[name].get("is_causal", False)
    fwd = rules.dot_product_attention(4, 3, is_causal=is_causal, mult=mult).fwd
    check(
        functools.partial(ops.dot_product_attention, implementation="chunked", **CASES[name]),
        functools.partial(attention, **CASES[name]),
        normal(name, shape, shape, shape),
        fwd=fwd,
        bwd=(fwd,) * 3,
        slack=SLACK["float32"],
        transforms=TRANSFORMS["float32"],
    )


def test_large_logits_that_are_equal() -> None:
    """The logarithm of a sum of two is lost beside a logit of 2^24."""
    q, v = jnp.full((1, 1, 1, 1), 2.0**24), jnp.asarray([1.0, 3.0]).reshape(1, 2, 1, 1)
    f = functools.partial(ops.dot_product_attention, implementation="chunked")
    y, (_, _, dv) = pulled(f, q, jnp.ones((1, 2, 1, 1)), v)
    fwd = rules.dot_product_attention(1, 2, is_causal=False).fwd
    np.testing.assert_allclose(y.ravel(), [2 * fwd], rtol=1e-6)
    np.testing.assert_allclose(dv.ravel(), [0.5 * fwd] * 2, rtol=1e-6)


def test_float16_gradients_of_weights_and_logits_stay_out_of_float16() -> None:
    """They are sums over a head's features, beyond its range where those of q, k and v are not."""
    shape = (1, 64, 2, 64)
    q, k, v, ct = (np.float16(a) for a in normal("range", shape, shape, shape, shape))
    v, ct = np.float16(4) * abs(v), np.float16(400) * abs(ct)
    f = functools.partial(ops.dot_product_attention, implementation="chunked")
    half, single = (
        pulled(f, *(jnp.asarray(a, d) for a in (3 * q, 3 * k, v)), cotangent=jnp.asarray(ct, d))[1]
        for d in (jnp.float16, jnp.float32)
    )
    assert np.abs(np.einsum("bthd,bshd->bhts", *map(np.float32, (ct, v)))).max() > 65504
    for got, wanted in zip(half, single, strict=True):
        largest = np.abs(wanted).max()
        assert 1000 < largest < 65504
        np.testing.assert_allclose(np.float32(got), wanted, atol=4 * 2**-10 * largest, rtol=0)


def test_other_transformations_see_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scalify walks the loop; the check of gradients differentiates what is in it."""
    monkeypatch.setattr(chunked, "_CHUNK", {"cpu": 2})
    (x,) = (jnp.asarray(a, jnp.float32) for a in normal("walk", (1, 5, 2, 2)))
    params = {"q": jnp.float32(1.0), "k": jnp.float32(2.0), "v": jnp.float32(3.0)}

    def loss(params, x):
        q, k, v = (x * params[name] for name in "qkv")
        y = ops.dot_product_attention(q, k, v, is_causal=True, implementation="chunked")
        return jnp.sum(jnp.square(y.value))

    assert check_gradients(loss, params, x)
    wanted = jax.jit(jax.value_and_grad(loss))(params, x)
    scaled = jax.jit(scalify(jax.value_and_grad(loss)))(as_scaled(params), as_scaled(x))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), to_array(scaled), wanted)


def test_forward_mode_says_what_to_do() -> None:
    x = jnp.ones((1, 4, 1, 2))
    with pytest.raises(TypeError, match="reverse mode"):
        jax.jvp(lambda x: chunked.attend_in_chunks(x, x, x, None, True, 1.0), (x,), (x,))


def test_nothing_to_attend_from() -> None:
    for shape in ((0, 3, 2, 4), (2, 0, 2, 4)):
        q, kv = jnp.ones(shape), jnp.ones((shape[0], 3, 2, 4))
        f = functools.partial(ops.dot_product_attention, implementation="chunked", is_causal=True)
        y, (_, dk, _) = pulled(f, q, kv, kv)
        assert y.shape == shape
        np.testing.assert_array_equal(dk, 0)


def test_batch_and_heads_divided_over_devices_need_no_exchange(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunked, "_CHUNK", {"cpu": CHUNK})
    mesh = make_mesh({"data": 2, "tensor": 2}, devices=jax.devices()[:4])
    place = NamedSharding(mesh, P("data", None, "tensor"))
    q, kv, ct = (
        jax.ShapeDtypeStruct((2, 8, heads, 4), jnp.float32, sharding=place) for heads in (4, 2, 4)
    )

    def grads(q, k, v, ct):
        f = functools.partial(ops.dot_product_attention, implementation="chunked", is_causal=True)
        y, vjp = jax.vjp(lambda *args: f(*args).data, q, k, v)
        return y, vjp(ct)

    program = jax.jit(grads).lower(q, kv, kv, ct).compile()
    found = re.findall(r"all-\w+|collective-\w+|reduce-scatter", program.as_text())
    assert not found
    assert all(s.is_equivalent_to(place, 4) for s in jax.tree.leaves(program.output_shardings))


@pytest.fixture
def optimized() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("is_causal", [False, True])
def test_no_array_of_all_weights(is_causal: bool) -> None:
    """What the compiled program holds at once, forward and backward, is not quadratic."""
    x = jax.ShapeDtypeStruct((1, 2048, 2, 16), jnp.float32)
    bytes_of_weights = 2 * 2048**2 * 4

    def temporaries(implementation: str) -> int:
        def f(x, ct):
            options = {"is_causal": is_causal, "implementation": implementation}
            y, vjp = jax.vjp(lambda x: ops.dot_product_attention(x, x, x, **options).data, x)
            return y, vjp(ct)

        return jax.jit(f).lower(x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries("plain") >= bytes_of_weights
    assert temporaries("chunked") < 0.2 * bytes_of_weights


@pytest.mark.parametrize(
    ("length", "most", "size"),
    [(1, 4, 1), (4, 4, 4), (5, 4, 3), (9, 4, 3), (1100, 512, 367)],
)
def test_chunks_are_equal_and_leave_little_over(length: int, most: int, size: int) -> None:
    assert chunked._size(length, most) == size

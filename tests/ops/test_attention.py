"""Dot-product attention, all weights at once and in chunks, against NumPy in float64."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.batching import compute
from unitscale import as_scaled, ops, rules, scalify, to_array
from unitscale.analysis import check_gradients
from unitscale.ops import _attention_kernels as kernels
from unitscale.parallel import make_mesh

from .conformance import assert_close, case, check, check_all, normal, pulled, rounded, scaled, slow

BATCH, TIME, SOURCE, DIM = 2, 11, 6, 4
SHAPE = (1, 3, 2, 4)
# Logits, weights and result are each rounded to 16 bits.
SLACK = {"float64": 1, "float32": 1, "float16": 4, "bfloat16": 4}
attend = ops.dot_product_attention
IMPLEMENTATIONS = ["plain", "chunked"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use chunks of at most 4 queries and 4 keys, so that the last chunks are not full."""
    monkeypatch.setattr(kernels, "_CHUNK", {"cpu": 4})


def drawn(shape: tuple[int, ...], share: float) -> np.ndarray:
    return np.random.default_rng(len(shape)).random(shape) < share


HIDDEN = drawn((BATCH, 4, TIME, SOURCE), 0.5)
HIDDEN[:, :, 2] = HIDDEN[0, 1, 7:] = False  # rows with nothing to attend to
LATE = HIDDEN.copy()
LATE[:, :, :3, :4] = False  # keys that come later than the query alone
IDS = np.repeat([[5, 2, 7, 7], [1, 3, 3, 0]], [3, 3, 2, 3], axis=1)
PADDED = drawn((BATCH, 1, 1, TIME), 0.8)
PER_ITEM = np.float32([2, 0.25]).reshape(2, 1, 1, 1)
NONE = (None, None, None)
# Query heads, key heads, mask, causal, scales of q, k and v, and further options.
TABLE: dict[str, tuple[Any, ...]] = {
    "full": (4, 4, None, False, NONE),
    "grouped": (4, 2, None, False, NONE),
    "grouped causal": (4, 1, None, True, NONE),
    "mask causal": (4, 4, LATE, True, NONE),
    "mask grouped": (4, 2, HIDDEN, False, NONE),
    "mask of keys": (4, 2, drawn((BATCH, 1, 1, SOURCE), 0.6), False, NONE),
    "mask of queries": (4, 2, drawn((TIME, 1), 0.6), True, NONE),
    "mask of heads": (4, 2, drawn((4, 1, SOURCE), 0.6), False, NONE),
    "scales": (4, 2, HIDDEN, False, (4.0, 0.5, 2.0**10)),
    "scales of items": (4, 2, None, True, (PER_ITEM, np.float32(0.5), PER_ITEM)),
    "window": (4, 2, None, False, NONE, {"local_window_size": 3}),
    "uneven window": (4, 2, None, False, NONE, {"local_window_size": (5, 1)}),
    "causal window": (4, 2, None, True, NONE, {"local_window_size": (4, 2)}),
    "all before": (4, 2, None, False, NONE, {"local_window_size": (TIME, 2)}),
    "segments": (4, 2, None, False, NONE, {"segment_ids": IDS}),
    "segments, window": (4, 2, PADDED, True, NONE, {"segment_ids": IDS, "local_window_size": 2}),
}


def allowed(local_window_size: Any = None, segment_ids: Any = None) -> np.ndarray:
    """Return the mask of a window and of segments."""
    behind = np.arange(TIME)[:, None] - np.arange(TIME)
    left, right = np.broadcast_to(TIME if local_window_size is None else local_window_size, 2)
    ids = np.zeros((BATCH, TIME)) if segment_ids is None else segment_ids
    same = (ids[:, :, None] == ids[:, None, :])[:, None]
    return same & (behind <= left) & (-behind <= right)


def reference(q, k, v, ct, mask=None, is_causal=False, mult=1.0):
    """Compute attention and its gradients in float64 by the textbook formulas."""
    groups, factor = q.shape[2] // k.shape[2], mult / q.shape[-1]
    wide_k, wide_v = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
    logits = factor * np.einsum("bthd,bshd->bhts", q, wide_k)
    allowed = np.broadcast_to(True if mask is None else mask, logits.shape)
    if is_causal:
        allowed = allowed & np.tril(np.ones(logits.shape[-2:], bool))
    nothing = ~allowed.any(-1, keepdims=True)
    weights = np.where(allowed, np.exp(logits - logits.max(-1, keepdims=True)), 0) + nothing
    weights /= weights.sum(-1, keepdims=True)
    by_weights = np.einsum("bthd,bshd->bhts", ct, wide_v)
    mean = (weights * by_weights).sum(-1, keepdims=True)
    by_logits = factor * weights * (by_weights - mean) * allowed
    dk, dv = (
        np.einsum("bhts,bthd->bshd", a, b).reshape(*k.shape[:3], groups, -1).sum(3)
        for a, b in ((by_logits, q), (weights, ct))
    )
    dq = np.einsum("bhts,bshd->bthd", by_logits, wide_k)
    return np.einsum("bhts,bshd->bthd", weights, wide_v), dq, dk, dv


def attention(q, k, v, **options):
    return reference(q, k, v, np.zeros(q.shape), **options)[0]


def factors(length: int = SOURCE, **options):
    return rules.dot_product_attention(DIM, length, **{"is_causal": False, **options})


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("plain", "float32"),
        ("plain", "float16"),
        ("chunked", "bfloat16"),
        slow("chunked", "float32"),
        slow("plain", "bfloat16"),
        slow("chunked", "float16"),
        *(slow(name, "float64") for name in IMPLEMENTATIONS),
    ],
)
def test_values_and_gradients(implementation: str, dtype: str) -> None:
    def program(arguments: dict[str, Any]) -> dict[str, Any]:
        results = {}
        for name, (*args, ct) in arguments.items():
            _, _, mask, is_causal, scales, *more = TABLE[name]
            how = {"mask": mask, "is_causal": is_causal, "implementation": implementation}
            how |= more[0] if more else {}
            y, vjp = jax.vjp(
                lambda *a, s=scales, how=how: attend(*scaled(a, s, dtype), **how).data, *args
            )
            results[name] = (y, *vjp(ct))
        return results

    given = {}
    few = "grouped", "mask of queries", "scales of items", "segments, window"
    names = TABLE if dtype == "float32" else few
    for name in names:
        heads, kv_heads, _, _, _, *more = TABLE[name]
        q, kv = (BATCH, TIME, heads, DIM), (BATCH, TIME if more else SOURCE, kv_heads, DIM)
        given[name] = tuple(rounded(a, dtype) for a in normal(name, q, kv, kv, q))
    with jax.enable_x64(dtype == "float64"):
        typed = {n: tuple(jnp.asarray(a, dtype) for a in arrays) for n, arrays in given.items()}
        found = jax.jit(program)(typed)
        found = jax.tree.map(lambda x: (np.asarray(x).astype(np.float64), x.dtype), found)
    for name, (q, k, v, ct) in given.items():
        _, _, mask, is_causal, (qs, ks, _), *more = TABLE[name]
        logit_scale = np.float64(1 if qs is None else qs) * np.float64(1 if ks is None else ks)
        fwd = factors(is_causal=is_causal).fwd
        if more:
            window = more[0].get("local_window_size", TIME)
            left, right = np.broadcast_to(window, 2)
            keys = int(left + 1 + (0 if is_causal else right)) if left < TIME - 1 else None
            fwd = factors(TIME, is_causal=is_causal, keys_per_query=keys).fwd
            mask = allowed(**more[0]) & (True if mask is None else mask)
        y, dq, dk, dv = reference(q * logit_scale, k, v, ct, mask, is_causal)
        # Gradients are those of data: of q and k before their scales.
        wanted = (y, dq * logit_scale, dk, dv)
        for what, (got, kind), want in zip("yqkv", found[name], wanted, strict=True):
            assert kind == dtype
            assert_close(got, fwd * want, dtype, f"{what} of {name}", SLACK[dtype])


@pytest.mark.parametrize("implementation", [slow("plain"), "chunked"])
def test_every_transformation(implementation: str) -> None:
    given = {"mask": drawn((3, 3), 0.5) | np.eye(3, dtype=bool), "is_causal": True, "mult": 2.0}
    fwd = factors(3, is_causal=True, mult=2.0).fwd
    check(
        functools.partial(attend, implementation=implementation, **given),
        functools.partial(attention, **given),
        normal("transforms", SHAPE, SHAPE, SHAPE),
        fwd=fwd,
        bwd=(fwd,) * 3,
        mapped=True,
    )


def test_constraints_and_scales_that_vary() -> None:
    args, cases = normal("constraint", SHAPE, SHAPE, SHAPE), {}
    for dtype, constraint in (("float32", "gmean"), ("float16", None)):
        found = factors(3, mult=2.0, constraint=constraint)
        cases[constraint] = case(
            functools.partial(attend, mult=2.0, constraint=constraint),
            functools.partial(attention, mult=2.0),
            args,
            fwd=found.fwd,
            bwd=found.bwd,
            dtype=dtype,
            slack=SLACK[dtype],
        )
        fwd = factors(3).fwd
        cases[dtype] = case(
            attend,
            attention,
            args,
            fwd=fwd,
            bwd=(fwd,) * 3,
            dtype=dtype,
            scales=(np.float32([0.5, 1, 2, 4]), np.float32([[1], [0.5]]), np.float32([1, 2, 4, 8])),
            slack=2 * SLACK[dtype],
        )
    check_all(cases)


FAR = [(100, -100, 0, "float16"), (100, 100, -100, "float32"), (-100, -100, 100, "float32")]


def test_scales_far_from_1() -> None:
    """The product of scales may overflow float32 although the logits do not."""
    table = {}
    for q_power, k_power, shift, dtype in FAR:
        q, k, v = (jnp.asarray(a, dtype) for a in normal("far", SHAPE, SHAPE, SHAPE))
        moved, powers = 2.0 ** float(shift), (2.0**q_power, 2.0**k_power, None)
        far = scaled((q * moved, k * moved, v), powers, dtype)
        table[q_power, k_power, shift, dtype] = (attend, *far)
        table[0, 0, 0, dtype] = attend, q, k, v
    found = compute(table)
    for (*powers, dtype), y in found.items():
        y, near = (np.asarray(a.value, np.float32) for a in (y, found[0, 0, 0, dtype]))
        eps = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(y, near, rtol=4 * eps, atol=4 * eps, err_msg=str(powers))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strict_promotion(implementation: str) -> None:
    """Also during lowering, because JAX's own attention promotes bfloat16."""
    x = jax.ShapeDtypeStruct((2, 3, 4, 8), jnp.bfloat16)
    how = {"implementation": implementation, "is_causal": True, "mask": drawn((3, 3), 0.5)}
    with jax.numpy_dtype_promotion("strict"):
        program = jax.jit(jax.grad(lambda *x: attend(*x, **how).value.sum(), (0, 1, 2)))
        grads = program.lower(x, x, x).out_info
    assert {g.dtype.name for g in grads} == {"bfloat16"}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_float16_gradients_overflow_only_where_they_are_beyond_its_range(implementation) -> None:
    """Gradients of weights and logits are sums over the head, larger than those of q, k and v."""
    shape = (1, 64, 2, 64)
    q, k, v, ct = (np.float16(a) for a in normal("range", shape, shape, shape, shape))
    v, ct = np.float16(4) * abs(v), np.float16(400) * abs(ct)
    half, single = (
        pulled(
            functools.partial(attend, implementation=implementation),
            *(jnp.asarray(a, d) for a in (3 * q, 3 * k, v)),
            cotangent=jnp.asarray(ct, d),
        )[1]
        for d in (jnp.float16, jnp.float32)
    )
    assert np.abs(np.einsum("bthd,bshd->bhts", *map(np.float32, (ct, v)))).max() > 65504
    for got, wanted in zip(half, single, strict=True):
        largest = np.abs(wanted).max()
        assert 1000 < largest < 65504
        np.testing.assert_allclose(np.float32(got), wanted, atol=4 * 2**-10 * largest, rtol=0)


def test_large_logits_that_are_equal() -> None:
    """Adding log(2) to a logit of 2^24 has no effect in float32."""
    q, v = jnp.full((1, 1, 1, 1), 2.0**24), jnp.asarray([1.0, 3.0]).reshape(1, 2, 1, 1)
    f = functools.partial(attend, implementation="chunked")
    y, (_, _, dv) = pulled(f, q, jnp.ones((1, 2, 1, 1)), v)
    fwd = rules.dot_product_attention(1, 2, is_causal=False).fwd
    np.testing.assert_allclose(y.ravel(), [2 * fwd], rtol=1e-6)
    np.testing.assert_allclose(dv.ravel(), [0.5 * fwd] * 2, rtol=1e-6)


def test_scale_length_and_scale_causal() -> None:
    causal = np.tril(np.ones((3, 3), bool))
    ways: dict[str, dict[str, Any]] = {
        "whole": {},
        "causal": {"is_causal": True},
        "window": {"local_window_size": (2, 0)},
        "length": {"is_causal": True, "scale_length": 64},
        # Causality that comes in through the mask, as with a cache of keys.
        "masked": {"mask": causal, "scale_causal": True},
        "given": {"mean_square": 0.25},
    }
    args = [np.float32(a) for a in normal("length", SHAPE, SHAPE, SHAPE)]
    found = compute({name: (functools.partial(attend, **how), *args) for name, how in ways.items()})
    whole, plain, window, length, masked, given = (np.asarray(y.data) for y in found.values())
    ratio = factors(64, is_causal=True).fwd / factors(3, is_causal=True).fwd
    np.testing.assert_allclose(length, ratio * plain, rtol=1e-5)
    np.testing.assert_allclose((window, masked), (plain, plain), rtol=1e-5)
    np.testing.assert_allclose(given, 2 / factors(3).fwd * whole, rtol=1e-5)


def test_dropout() -> None:
    args = [np.float32(a) for a in normal("dropout", *[(2, 8, 2, 4)] * 3)]
    trained = functools.partial(attend, deterministic=False)

    def draws(keys, *args):
        f = functools.partial(trained, *args, dropout_rate=0.36)
        return jax.vmap(lambda key: f(dropout_key=key).data)(keys)

    found = compute(
        {
            "plain": (lambda *a: attend(*a).data, *args),
            "expected": (lambda *a: attend(*a, dropout_rate=0.36).data, *args),
            "without a rate": (lambda *a: trained(*a).data, *args),
            "draws": (draws, jax.random.split(jax.random.key(0), 64), *args),
        }
    )
    plain, expected, without, drawn = map(np.asarray, found.values())
    # Evaluation gives the expected value, which training averages to.
    np.testing.assert_allclose(expected, 0.8 * plain, rtol=1e-5)
    error = drawn.std(0, ddof=1) / 8
    assert (np.abs(drawn.mean(0) - 0.8 * plain) < 6 * error).all()
    assert (error > 0.01).any()
    np.testing.assert_allclose(without, plain, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "rate", "implementation"),
    [("float16", 0.0, "plain"), slow("bfloat16", 0.5, "plain"), ("float32", 0.0, "chunked")],
)
def test_operands_that_vary_differently_in_shard_map(dtype, rate, implementation) -> None:
    """Each device's queries attend to all values, whose gradients are summed over devices."""
    q, v = (jnp.asarray(a, dtype) for a in normal("shard", (2, 8, 2, 4), (1, 8, 2, 4)))
    options = {"is_causal": not rate, "dropout_rate": rate, "implementation": implementation}
    options |= {"dropout_key": jax.random.key(0), "deterministic": False}

    def grads(q, v):
        f = lambda *kv: attend(q, *kv, **options).data.astype("float32").sum()  # noqa: E731
        return jax.grad(f, (0, 1))(v, v)

    mesh = make_mesh({"d": 2}, devices=jax.devices()[:2])
    mapped = jax.jit(jax.shard_map(grads, mesh=mesh, in_specs=(P("d"), P()), out_specs=P()))
    each = [jax.jit(grads)(q[i : i + 1], v) for i in range(2)]
    for found, *parts in zip(mapped(q, v), *each, strict=True):
        expected = sum(np.asarray(part, np.float32) for part in parts)
        tolerance = 4 * float(jnp.finfo(dtype).eps) * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(found, np.float32), expected, atol=tolerance, rtol=0)


@pytest.mark.slow
def test_other_transformations_see_the_same_function() -> None:
    """Scalify and `check_gradients` also handle the loop over chunks."""
    (x,) = (jnp.asarray(a, jnp.float32) for a in normal("walk", (1, 5, 2, 2)))
    params = {"q": jnp.float32(1.0), "k": jnp.float32(2.0), "v": jnp.float32(3.0)}

    def loss(params, x):
        q, k, v = (x * params[name] for name in "qkv")
        return jnp.sum(jnp.square(attend(q, k, v, is_causal=True, implementation="chunked").value))

    assert check_gradients(loss, params, x)
    wanted = jax.jit(jax.value_and_grad(loss))(params, x)
    found = jax.jit(scalify(jax.value_and_grad(loss)))(as_scaled(params), as_scaled(x))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), to_array(found), wanted)
    window = kernels.Window(None, 0)
    with pytest.raises(TypeError, match="reverse-mode"):
        jax.jvp(lambda x: kernels.attend_in_chunks(x, x, x, None, None, window, 1.0), (x,), (x,))


def test_nothing_to_attend_from() -> None:
    for shape in ((0, 3, 2, 4), (2, 0, 2, 4)):
        q, kv = jnp.ones(shape), jnp.ones((shape[0], 3, 2, 4))
        y, (_, dk, _) = pulled(functools.partial(attend, implementation="chunked"), q, kv, kv)
        assert y.shape == shape
        np.testing.assert_array_equal(dk, 0)


def test_batch_and_heads_divided_over_devices_need_no_exchange() -> None:
    mesh = make_mesh({"data": 2, "tensor": 2}, devices=jax.devices()[:4])
    place = NamedSharding(mesh, P("data", None, "tensor"))
    q, kv, ct = (
        jax.ShapeDtypeStruct((2, 8, heads, 4), jnp.float32, sharding=place) for heads in (4, 2, 4)
    )

    def grads(q, k, v, ct):
        f = functools.partial(attend, implementation="chunked", is_causal=True)
        y, vjp = jax.vjp(lambda *args: f(*args).data, q, k, v)
        return y, vjp(ct)

    program = jax.jit(grads).lower(q, kv, kv, ct).compile()
    assert not re.findall(r"all-\w+|collective-\w+|reduce-scatter", program.as_text())
    assert all(s.is_equivalent_to(place, 4) for s in jax.tree.leaves(program.output_shardings))


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("is_causal", [slow(False), True])
def test_no_array_of_all_weights(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the compiled program is not quadratic in the sequence length."""
    monkeypatch.setattr(kernels, "_CHUNK", {"cpu": 128})
    x = jax.ShapeDtypeStruct((1, 2048, 2, 16), jnp.float32)
    bytes_of_weights = 2 * 2048**2 * 4

    def temporaries(implementation: str) -> int:
        def f(x, ct):
            options = {"is_causal": is_causal, "implementation": implementation}
            y, vjp = jax.vjp(lambda x: attend(x, x, x, **options).data, x)
            return y, vjp(ct)

        return jax.jit(f).lower(x, x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries("plain") >= bytes_of_weights
    assert temporaries("chunked") < 0.2 * bytes_of_weights

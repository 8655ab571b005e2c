"""Attention and its cache, residual branches, transformer layers and stacks, scans over layers."""

import functools
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.bench.wire import collectives
from tests.gradients import jit
from tests.modules import build
from tests.nn.table import functional, loss_and_value, sine_loss
from tests.parallel.devices import mesh_of, relative_error
from tests.refusals import refuses
from unitscale import nn, ops, rules
from unitscale.core import is_scaled, to_array
from unitscale.parallel import param_shardings

WIDTH, HEADS, TIME, LAYERS = 16, 4, 6, 2


def attention(**options) -> nn.MultiHeadAttention:
    return nn.MultiHeadAttention(HEADS, WIDTH, **options, rngs=nnx.Rngs(0))


def inputs(time: int = TIME, features: int = WIDTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(2, time, features)).astype(np.float32)


X = inputs()


def composed(layer, x, source, mask):
    """The layer by its matmuls and the op."""
    source = x if source is None else source

    def heads(dense, x):
        y = dense(x).value
        return y.reshape(*y.shape[:-1], -1, layer.head_dim)

    operands = heads(layer.query, x), heads(layer.key, source), heads(layer.value, source)
    options = {"mask": mask, "is_causal": layer.is_causal, "mult": layer.mult}
    options["local_window_size"] = layer.local_window_size
    y = ops.dot_product_attention(*operands, scale_length=layer.max_length, **options).value
    return layer.out(y.reshape(*y.shape[:-2], -1)).value


def test_attention_is_composed_of_matmuls_and_the_op() -> None:
    some = np.random.default_rng(0).random((TIME, 9)) < 0.6
    wide, other = {"num_kv_heads": 1, "qkv_features": 32, "out_features": 5}, inputs(9, 7, seed=1)
    cases: list[tuple[dict[str, Any], Any, Any]] = [
        ({}, None, None),
        ({"is_causal": True, "mult": 3.0}, None, None),
        ({"is_causal": True, "local_window_size": 2}, None, None),
        ({"num_kv_heads": 2, "max_length": 20}, None, None),
        ({"is_causal": True, **wide}, None, None),
        ({"in_kv_features": 7}, other, some),
    ]
    layers = [attention(**options) for options, _, _ in cases]

    @jit
    def run(x):
        return [
            (layer(x, source, mask=mask).value, composed(layer, x, source, mask))
            for layer, (_, source, mask) in zip(layers, cases, strict=True)
        ]

    for found, expected in run(X):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    again = layers[-1](X, other, inputs(9, 7, seed=2), mask=some).value
    assert not np.allclose(again, expected, atol=0.1)


@pytest.mark.parametrize(
    ("batch", "masked"), [((3, 2), (3, 2, 1, TIME, TIME)), ((), (HEADS, 1, TIME))]
)
def test_any_number_of_batch_axes(batch, masked) -> None:
    """The result is the same as for one sequence at a time."""
    layer = attention(num_kv_heads=2, rotary_base=100.0)
    x, source = jax.random.normal(jax.random.key(0), (2, *batch, TIME, WIDTH))
    mask = jax.random.bernoulli(jax.random.key(2), 0.7, masked)
    places = jax.random.randint(jax.random.key(3), (*batch, TIME), 0, 50)
    call = jit(lambda x, source, mask, p: layer(x, source, mask=mask, positions=p).value)
    y = call(x, source, mask, places)
    assert y.shape == x.shape
    for index in np.ndindex(*batch):
        own = mask if mask.ndim < 3 + len(batch) else mask[index]
        alone = call(x[index], source[index], own, places[index])
        np.testing.assert_allclose(y[index], alone, rtol=1e-4, atol=1e-5)


def test_rotary_positions_are_relative() -> None:
    layer, places = attention(rotary_base=30.0, is_causal=True), jnp.arange(TIME)
    rows = None, places + 11, places + jnp.array([[0], [5]]), 3 * places
    found = jit(lambda x: [layer(x, positions=p).value for p in rows])(X)
    plain, shifted, per_item, stretched = found
    np.testing.assert_allclose(shifted, plain, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(per_item, plain, rtol=1e-4, atol=1e-4)
    assert not np.allclose(stretched, plain, atol=1e-2)


def test_the_implementation_is_that_of_calls_and_not_of_decoding() -> None:
    """A cache needs a mask, which the requested kernel may not support."""
    layer = attention(is_causal=True, max_length=8, implementation="chunked")
    with ops.attention_paths() as taken:
        jax.eval_shape(layer, X)
        jax.eval_shape(lambda x: layer.decode(x, layer.init_cache(2, 8)), X)
    assert [path.implementation for path in taken] == ["chunked", "plain"]


def test_dropout_on_the_weights_and_its_keys() -> None:
    layer, other = (
        nn.MultiHeadAttention(
            HEADS, WIDTH, dropout_rate=0.5, rngs=nnx.Rngs(params=0, dropout=1), keep_rngs=keep
        )
        for keep in (True, False)
    )
    call = nnx.jit(lambda layer, x, **options: layer(x, **options).value)
    first, second, quiet = call(layer, X), call(layer, X), layer(X, deterministic=True).value
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, quiet)
    layer.eval()
    np.testing.assert_array_equal(layer(X).value, quiet)
    layer.train()
    assert not np.array_equal(call(layer, X), quiet)
    assert not jax.tree.leaves(nnx.state(other, nnx.RngState))
    key = nnx.Rngs(dropout=1).dropout()
    np.testing.assert_array_equal(call(other, X, rngs=key), call(layer, X, rngs=key))
    with pytest.raises(ValueError, match="give rngs="):
        other(X)


def test_the_weighted_sum_of_a_residual() -> None:
    branch = nn.Dense(8, 8, rngs=nnx.Rngs(0))
    layer, x = nn.Residual(branch, tau=0.75), inputs(3, 8)
    np.testing.assert_allclose(layer(x).value, 0.6 * branch(x).value + 0.8 * x, atol=1e-6)
    # Further arguments go to the branch.
    layer = nn.Residual(nn.MLP(8, 8, dropout_rate=0.5, rngs=nnx.Rngs(0)), tau=1.0)
    once, again = (layer(x, deterministic=True).value for _ in range(2))
    np.testing.assert_array_equal(once, again)


def layer_of(**options) -> nn.TransformerLayer:
    return nn.TransformerLayer(WIDTH, 2, 24, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_layer_is_two_residual_branches(placement) -> None:
    block = build(lambda: layer_of(norm_placement=placement, taus=(0.3, 0.9), is_causal=True))

    def branch(x, fn, norm, tau):
        inner = norm(x) if placement == "pre" else x
        w = rules.residual(tau)
        y = w.branch * fn(inner).value + w.skip * x
        return norm(y).value if placement == "post" else y

    @jit
    def both(x):
        expected = branch(x, block.attention, block.attention_norm, 0.3)
        return block(x).value, branch(expected, block.mlp, block.mlp_norm, 0.9)

    np.testing.assert_allclose(*both(X), rtol=1e-4, atol=1e-4)


def test_a_stack_follows_its_scheme() -> None:
    for scheme in get_args(rules.ResidualScheme):
        settings = {"tau": 0.4, "mult": 0.7, "attention_ratio": 1.5, "scheme": scheme}
        settings = {f"residual_{key}": value for key, value in settings.items()}
        stack = nnx.eval_shape(
            lambda s=settings: nn.TransformerStack(3, WIDTH, 2, norm="layer", **s, rngs=nnx.Rngs(0))
        )
        taus = rules.residual_taus(scheme, 6, tau=0.4, mult=0.7, attn_ratio=1.5)
        assert tuple(t for block in stack.layers for t in block.taus) == taus
    assert isinstance(stack.layers[0].mlp_norm, nn.LayerNorm)
    assert isinstance(layer_of(norm="rms").attention_norm, nn.RMSNorm)


def stack_of(layers: int = LAYERS, **options) -> nn.TransformerStack:
    options = {"is_causal": True, "residual_attention_ratio": 1.3, **options}
    return build(
        lambda: nn.TransformerStack(layers, WIDTH, 2, 24, **options, rngs=nnx.Rngs(0)), seed=1
    )


def saved(loss, params) -> list[jax.ShapeDtypeStruct]:
    """Return the arrays that are saved for the backward pass."""
    return jax.tree.leaves(jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params))


@pytest.mark.slow
def test_remat_changes_no_number() -> None:
    """Values, gradients and dropout masks are equal, and less is saved for the backward pass."""
    losses, sizes = [], []
    for remat in ("none", "dots", "layer"):
        stack = stack_of(1, remat=remat, dropout_rate=0.3)
        loss, params = functional(stack, lambda model: sine_loss(model, X))
        sizes.append(sum(leaf.size for leaf in saved(loss, params)))
        losses.append(jax.value_and_grad(loss))
    plain, *others = jit(lambda params: [loss(params) for loss in losses])(params)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    for other in others:
        jax.tree.map(near, other, plain)
    assert sizes == sorted(set(sizes), reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_remat_saves_quantized_inputs(scan: bool) -> None:
    """One byte for each input of a matmul; the gradient is the same."""
    x, losses, sizes = jnp.asarray(X, jnp.bfloat16), [], []
    for remat in ("quantized", "layer"):
        options = {"remat": remat, "scan": scan, "policy": "fp8_dynamic", "rngs": nnx.Rngs(0)}
        stack = nn.TransformerStack(2, WIDTH, 2, 24, **options)
        loss, params = functional(stack, lambda model: sine_loss(model, x))
        losses.append(jax.grad(loss))
        sizes.append(sum(leaf.size for leaf in saved(loss, params) if leaf.dtype.itemsize == 1))
    found = jit(lambda params: [loss(params) for loss in losses])(params)
    jax.tree.map(np.testing.assert_array_equal, *found)
    # Inputs of query, key, value, out and up have the width, that of down is hidden.
    assert sizes[1] == 0
    assert sizes[0] in (2 * x.size // WIDTH * (n * WIDTH + 24) for n in (4, 5))


@pytest.mark.slow
@pytest.mark.parametrize(("activation", "devices"), [("silu_glu", 2), ("gelu", 4)])
def test_tensor_parallel_branches_sum_once(activation, devices: int) -> None:
    """The forward pass sums over devices, without gathering matrices, heads or hidden units."""
    mesh = mesh_of(tensor=devices)
    options = {"is_causal": True, "activation": activation, "use_bias": False}
    layer = build(lambda: nn.TransformerLayer(32, 4, **options, rngs=nnx.Rngs(0)))
    forward, params = functional(layer)
    shardings = param_shardings(params, mesh, small=256)
    placed, whole = jax.device_put(params, shardings), jax.NamedSharding(mesh, jax.P())
    x = inputs(5, 32)

    def gradients(params, x):
        return jax.grad(lambda *args: jnp.sum(jnp.cos(forward(*args))), argnums=(0, 1))(params, x)

    for f, out in ((forward, whole), (gradients, (shardings, whole))):
        compiled = jax.jit(f, out_shardings=out).lower(placed, x).compile()
        # Gains of norms are summed too; the smallest array that a branch could gather is larger.
        large = [c.kind for c in collectives(compiled) if c.size > 32 * 4]
        assert set(large) == {"all-reduce"}
        # Backward one sum for each matrix that reads a branch's input, or one for them together.
        readers = 5 if activation.endswith("_glu") else 4
        assert len(large) <= (2 if f is forward else 2 + readers)
        found = jax.tree.leaves(compiled(placed, x))
        for got, wanted in zip(found, jax.tree.leaves(jit(f)(params, x)), strict=True):
            assert relative_error(got, wanted) < 1e-5


def values_and_gradients(stack: nn.TransformerStack):
    """Return the output for two batch axes, and gradients by (stacked) parameters and input."""
    loss, params = functional(stack, loss_and_value)
    (_, y), grads = jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, X[:, None])
    by_params = jax.tree.map(np.asarray, nnx.to_pure_dict(grads[0])["layers"])
    if not stack.scan:
        by_params = jax.tree.map(lambda *g: np.stack(g), *by_params.values())
    return y, by_params, grads[1]


def assert_same(found, expected) -> None:
    """Check closeness relative to the largest entry; a key bias's gradient is only rounding.

    Layers have a dozen matmuls and norms, forward and backward, which amplify rounding errors.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    sizes = [np.abs(np.asarray(x, np.float64)).max() for x in jax.tree.leaves(expected)]
    for got, want, size in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), sizes, strict=True
    ):
        atol = 256 * 2.0**-24 * max(size, 2.0**-6 * max(sizes))
        np.testing.assert_allclose(np.float64(got), np.float64(want), rtol=0, atol=atol)


SCANNED = {
    "fixed": {"residual_scheme": "fixed", "is_causal": False, "num_kv_heads": 1},
    "post": {"norm_placement": "post", "norm": "layer", "activation": "silu_glu"},
    "remat, dropout": {"dropout_rate": 0.3, "remat": "dots", "num_kv_heads": 1},
    "rotary": {"rotary_base": 1e4, "max_length": 12, "local_window_size": 3},
}


@pytest.mark.parametrize(
    "name", ["fixed", *(pytest.param(n, marks=pytest.mark.slow) for n in list(SCANNED)[1:])]
)
def test_a_scan_computes_what_layers_do_one_by_one(name, monkeypatch) -> None:
    """Values, gradients and dropout masks are equal, also of stacked layers without a scan."""
    stack = stack_of(**SCANNED[name])
    expected = values_and_gradients(stack)
    assert_same(values_and_gradients(stack.with_scan(True)), expected)
    monkeypatch.setattr("unitscale.nn._transformer._STACKED", LAYERS)
    monkeypatch.setattr(jax, "default_backend", lambda: "metal")  # no attention kernel is for it
    automatic = stack.with_scan("auto")
    assert automatic.layers.mlp.up.kernel.shape[0] == LAYERS
    assert_same(values_and_gradients(automatic), expected)


def test_conversion_both_ways() -> None:
    stack = stack_of()
    scanned = stack.with_scan(True)
    back = scanned.with_scan(False)
    assert [layer.taus for layer in back.layers] == [layer.taus for layer in stack.layers]
    contexts = [layer.attention.context for layer in stack.layers]
    assert [layer.attention.context for layer in scanned.layer_list()] == contexts
    jax.tree.map(np.testing.assert_array_equal, nnx.state(back), nnx.state(stack))
    ours, others = (nn.TransformerStack(2, 8, 2, scan=s, rngs=nnx.Rngs(0)) for s in (True, False))
    kernels = [layer.mlp.up.kernel[...] for layer in others.layers]
    np.testing.assert_array_equal(ours.layers.mlp.up.kernel[...], np.stack(kernels))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "float16"])
def test_decoding_gives_what_the_uncached_stack_gives(policy: str) -> None:
    options = {"policy": policy, "rotary_base": 100.0, "num_kv_heads": 1, "max_length": TIME}
    options["local_window_size"] = 3
    one = stack_of(2, **options, attention_mult=2.0)
    expected = jit(lambda x: to_array(one(x)))(X)
    near = 32 * float(jnp.finfo(policy).eps)  # rounding a few times per layer
    for model in (one, one.with_scan(True)):
        step, cache, parts = jit(model.decode), model.init_cache(2, 8), []
        for x in (X[:, :4], X[:, 4:5], X[:, 5:]):
            y, cache = step(jnp.asarray(x), cache)
            parts.append(np.asarray(to_array(y), np.float64))
        found = np.concatenate(parts, axis=1)
        np.testing.assert_allclose(found, expected, rtol=near, atol=4 * near)
        assert {int(layer.length) for layer in cache} == {TIME}
        assert {layer.key.dtype.name for layer in cache} == {policy}
        # A full cache gives NaN and not wrong tokens.
        _, cache = step(jnp.asarray(X[:, :4]), model.init_cache(2, 4))
        assert np.isnan(to_array(step(jnp.asarray(X[:, 4:5]), cache)[0])).all()


@pytest.mark.parametrize(("scan", "counts"), [(True, (2, 7)), ("auto", (8, 9))])
def test_the_program_holds_one_layer(scan, counts) -> None:
    def length(count: int) -> int:
        stack = nnx.eval_shape(
            lambda: nn.TransformerStack(count, 8, 2, scan=scan, rngs=nnx.Rngs(0))
        )
        apply, params = functional(stack)
        return len(str(jax.make_jaxpr(apply)(params, jnp.ones((1, 3, 8)))).splitlines())

    few, many = map(length, counts)
    assert few == many


def test_other_layers_and_state_that_changes() -> None:
    layers = [nn.Dropout(0.5, rngs=nnx.Rngs(i)) for i in range(2)]
    stack = nn.stack_layers(layers)
    assert nn.unstack_layers(stack)[1].rngs.count[...] == 0
    transformer = stack_of(dropout_rate=0.5, scan=True)
    call = nnx.jit(lambda model, x: to_array(model(x)))
    assert not np.array_equal(call(transformer, X), call(transformer, X))
    counts = [c for _, c in nnx.iter_graph(transformer.layers) if isinstance(c, nnx.RngCount)]
    assert all((count[...] == 2).all() for count in counts)
    transformer.eval()
    np.testing.assert_array_equal(call(transformer, X), call(transformer, X))
    assert not any(map(is_scaled, jax.tree.leaves(nnx.state(transformer))))


def stack(**options) -> nn.TransformerStack:
    return nn.TransformerStack(2, WIDTH, 2, is_causal=True, **options, rngs=nnx.Rngs(0))


def dense(inputs: int, outputs: int) -> nn.Dense:
    return nn.Dense(inputs, outputs, rngs=nnx.Rngs(0))


def decode(batch: int, length: int, **options) -> Any:
    layer = attention(is_causal=True, max_length=9)
    return attention(**options).decode(X, layer.init_cache(batch, length))


CAUSAL = {"is_causal": True, "max_length": 9}
test_errors = refuses(
    [
        (ValueError, lambda: attention(qkv_features=18), "num_heads must divide qkv_features"),
        (ValueError, lambda: attention()(jnp.ones(WIDTH)), r"q must be \(batch, time, heads, d\)"),
        (ValueError, lambda: attention(decode=True), "decode and broadcast_dropout must be False"),
        (ValueError, lambda: attention(broadcast_dropout=True), "broadcast_dropout must be False"),
        (ValueError, lambda: attention(num_kv_heads=3), "num_kv_heads must divide num_heads"),
        (ValueError, lambda: attention(qkv_features=12, rotary_base=1.0), "need an even head size"),
        (ValueError, lambda: attention(implementation="flash"), "implementation must be one of"),
        (ValueError, lambda: attention(max_length=9).init_cache(1, 9), "needs is_causal=True"),
        (ValueError, lambda: attention(local_window_size=2), "local_window_size must be None, or"),
        (ValueError, lambda: attention(is_causal=True).init_cache(1, 9), "needs max_length="),
        (ValueError, lambda: decode(2, 9), "a cache needs is_causal=True"),
        (ValueError, lambda: decode(2, 4, **CAUSAL), "KVCache: expected keys .*'at most 4'"),
        (ValueError, lambda: decode(3, 9, **CAUSAL), r"KVCache: expected keys .*\(3, .*got \(2"),
        (ValueError, lambda: layer_of(activation="geglu"), "activation must be one of gelu"),
        (ValueError, lambda: layer_of(norm="batch"), "norm must be one of layer, rms"),
        (ValueError, lambda: layer_of(norm_placement="mid"), "norm_placement must be one of pre"),
        (ValueError, lambda: stack(remat="all"), "remat must be one of none"),
        (TypeError, lambda: stack(activatoin="gelu"), "activatoin"),
        (ValueError, lambda: stack().init_cache(1, 8), "a cache needs max_length="),
        (ValueError, lambda: nn.Residual(dense(4, 5), tau=0), "tau must be positive"),
        (ValueError, lambda: nn.stack_layers([dense(2, 2), dense(2, 3)]), "got 2 that differ"),
        (ValueError, lambda: nn.stack_layers([]), "at least one layer; got none"),
        (ValueError, lambda: nn.unstack_layers(nn.Dropout(0.0)), "stacked state"),
    ]
)

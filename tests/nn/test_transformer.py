"""Residual branches, transformer layers and stacks, and scans over layers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from recipes.bench.wire import collectives
from tests.gradients import jit
from tests.modules import build
from tests.optimizers import scaled
from tests.parallel.devices import mesh_of, relative_error
from tests.refusals import refuses
from unitscale import nn, rules
from unitscale.core import ScaledArray, is_scaled, to_array
from unitscale.parallel import param_shardings


def test_the_weighted_sum() -> None:
    branch = nn.Dense(8, 8, rngs=nnx.Rngs(0))
    layer = nn.Residual(branch, tau=0.75)
    x = jax.random.normal(jax.random.key(0), (3, 8))
    np.testing.assert_allclose(layer(x).value, 0.6 * branch(x).value + 0.8 * x, atol=1e-6)


def test_further_arguments_go_to_the_branch() -> None:
    layer = nn.Residual(nn.MLP(4, 8, dropout_rate=0.5, rngs=nnx.Rngs(0)), tau=1.0)
    x = jnp.ones((2, 4))
    once, again = (layer(x, deterministic=True).value for _ in range(2))
    np.testing.assert_array_equal(once, again)


WIDTH, TIME = 16, 5


def inputs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, TIME, WIDTH)).astype(np.float32)


def layer(**options) -> nn.TransformerLayer:
    return nn.TransformerLayer(WIDTH, 2, 24, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_layer_is_two_residual_branches(placement) -> None:
    make = lambda: layer(norm_placement=placement, taus=(0.3, 0.9), is_causal=True)  # noqa: E731
    block, x = build(make), inputs()

    def branch(x, fn, norm, tau):
        inner = norm(x) if placement == "pre" else x
        w = rules.residual(tau)
        y = w.branch * fn(inner).value + w.skip * x
        return norm(y).value if placement == "post" else y

    @jit
    def both(x):
        expected = branch(x, block.attention, block.attention_norm, 0.3)
        return block(x).value, branch(expected, block.mlp, block.mlp_norm, 0.9)

    np.testing.assert_allclose(*both(x), rtol=1e-4, atol=1e-4)


def test_a_stack_follows_its_scheme() -> None:
    for scheme in rules.RESIDUAL_SCHEMES:
        settings = {"tau": 0.4, "mult": 0.7, "attention_ratio": 1.5, "scheme": scheme}
        settings = {f"residual_{key}": value for key, value in settings.items()}
        stack = nnx.eval_shape(
            lambda s=settings: nn.TransformerStack(3, WIDTH, 2, norm="layer", **s, rngs=nnx.Rngs(0))
        )
        taus = rules.residual_taus(scheme, 6, tau=0.4, mult=0.7, attn_ratio=1.5)
        assert tuple(t for block in stack.layers for t in block.taus) == taus
    assert isinstance(stack.layers[0].mlp_norm, nn.LayerNorm)
    assert isinstance(layer(norm="rms").attention_norm, nn.RMSNorm)


def test_remat_changes_no_number() -> None:
    """Values, gradients and the masks of dropout; each saves less for the backward pass."""
    results, saved = [], []
    for remat in ("none", "dots", "layer"):
        settings = {"remat": remat, "is_causal": True, "dropout_rate": 0.3}
        make = lambda s=settings: nn.TransformerStack(2, WIDTH, 2, 24, **s, rngs=nnx.Rngs(0))  # noqa: E731
        graphdef, params, rest = nnx.split(build(make), nnx.Param, ...)

        def loss(params, graphdef=graphdef, rest=rest):
            return jnp.sum(jnp.sin(nnx.merge(graphdef, params, rest, copy=True)(inputs()).value))

        kept = jax.eval_shape(lambda params, loss=loss: jax.vjp(loss, params)[1], params)
        saved.append(sum(leaf.size for leaf in jax.tree.leaves(kept)))
        results.append(jax.tree.leaves(jit(jax.value_and_grad(loss))(params)))
    for plain, *others in zip(*results, strict=True):
        for other in others:
            np.testing.assert_allclose(plain, other, rtol=1e-4, atol=1e-4)
    assert saved == sorted(set(saved), reverse=True)


@pytest.mark.parametrize(
    ("activation", "devices"),
    [("silu_glu", 2), pytest.param("gelu", 4, marks=pytest.mark.slow)],
)
def test_tensor_parallel_branches_sum_once(activation, devices: int) -> None:
    """Over the devices, forward: their matrices, heads and hidden units are not gathered."""
    mesh = mesh_of(tensor=devices)
    layer = build(
        lambda: nn.TransformerLayer(
            32, 4, is_causal=True, activation=activation, use_bias=False, rngs=nnx.Rngs(0)
        )
    )
    graphdef, params = nnx.split(layer)
    shardings = param_shardings(params, mesh, small=256)
    placed, whole = jax.device_put(params, shardings), jax.NamedSharding(mesh, jax.P())
    x = jax.random.normal(jax.random.key(0), (2, TIME, 32))

    def forward(params, x):
        return nnx.merge(graphdef, params)(x).value

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


LENGTH, LAYERS = 6, 3


# Of three layers forward and backward, a dozen products and norms each, and what they amplify.
ROUNDINGS = 256


X = np.random.default_rng(0).normal(size=(2, LENGTH, WIDTH)).astype(np.float32)


def stack_of(**options) -> nn.TransformerStack:
    options = {"is_causal": True, "residual_attention_ratio": 1.3, **options}
    return build(
        lambda: nn.TransformerStack(LAYERS, WIDTH, 2, 24, **options, rngs=nnx.Rngs(0)), seed=1
    )


def values_and_gradients(stack: nn.TransformerStack, x=X):
    """The loss, the output, and gradients by parameters (stacked) and input."""
    graphdef, params, rest = nnx.split(stack, nnx.Param, ...)

    def loss(params, x):
        y = to_array(nnx.merge(graphdef, params, rest, copy=True)(x)).astype(jnp.float32)
        return jnp.sum(jnp.sin(y)), y

    (_, y), grads = jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, jnp.asarray(x))
    by_params = jax.tree.map(np.asarray, nnx.to_pure_dict(grads[0])["layers"])
    if not stack.scan:
        by_params = jax.tree.map(lambda *g: np.stack(g), *by_params.values())
    return y, by_params, grads[1]


def assert_same(found, expected, tolerance: float) -> None:
    """Within a share of the largest entry; the gradient of a key's bias is rounding alone."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    sizes = [np.abs(np.asarray(x, np.float64)).max() for x in jax.tree.leaves(expected)]
    for got, want, size in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), sizes, strict=True
    ):
        atol = tolerance * max(size, 2.0**-6 * max(sizes))
        np.testing.assert_allclose(np.float64(got), np.float64(want), rtol=0, atol=atol)


CASES = {
    "post": {"norm_placement": "post", "norm": "layer", "activation": "silu_glu"},
    "fixed": {"residual_scheme": "fixed", "is_causal": False, "num_kv_heads": 1},
    "rotary": {"rotary_base": 1e4, "max_length": 12, "use_bias": False},
    "remat dropout": {"dropout_rate": 0.3, "remat": "dots"},
}


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("post", "fixed", "remat dropout") else pytest.param(n, marks=pytest.mark.slow)
        for n in CASES
    ],
)
def test_numbers_are_those_of_the_layers_one_by_one(name: str) -> None:
    """Masks of dropout included."""
    stack = stack_of(**CASES[name])
    expected, found = values_and_gradients(stack), values_and_gradients(stack.with_scan(True))
    assert_same(found, expected, ROUNDINGS * 2.0**-24)


@pytest.mark.parametrize(
    ("placement", "scale"),
    [("post", 4.0), pytest.param("pre", np.float32([[[4]], [[0.5]]]), marks=pytest.mark.slow)],
    ids=str,
)
def test_scaled_parameters_and_inputs(placement: str, scale) -> None:
    """As an optimizer makes them: its biases have one scale for all layers."""
    stack = stack_of(norm_placement=placement)
    scanned = stack.with_scan(True)
    for model in (stack, scanned):
        tx = scaled(optax.sgd(0.1), weights=jnp.float32)
        nnx.update(model, tx.scale_params(nnx.state(model, nnx.Param)))
    kernel = scanned.layers.mlp.up.kernel.get_value()
    assert kernel.scale.shape == (LAYERS, 1, 1)
    x = ScaledArray(jnp.asarray(X), scale)

    def output(model):
        graphdef, state = nnx.split(model)
        return jit(lambda state, x: to_array(nnx.merge(graphdef, state)(x)))(state, x)

    assert_same(output(scanned), output(stack), ROUNDINGS * 2.0**-24)


def test_conversion_both_ways() -> None:
    stack = stack_of()
    scanned = stack.with_scan(True)
    back = scanned.with_scan(False)
    assert [layer.taus for layer in back.layers] == [layer.taus for layer in stack.layers]
    contexts = [layer.attention.context for layer in stack.layers]
    assert [layer.attention.context for layer in scanned.layer_list()] == contexts
    for a, b in zip(
        jax.tree.leaves(nnx.state(back)), jax.tree.leaves(nnx.state(stack)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    ours, others = (nn.TransformerStack(2, 8, 2, scan=s, rngs=nnx.Rngs(0)) for s in (True, False))
    kernels = [layer.mlp.up.kernel[...] for layer in others.layers]
    np.testing.assert_array_equal(ours.layers.mlp.up.kernel[...], np.stack(kernels))


@pytest.mark.parametrize("policy", ["float32", "float16"])
def test_decoding_gives_what_the_uncached_stack_gives(policy: str) -> None:
    options = {"policy": policy, "rotary_base": 100.0, "num_kv_heads": 1, "max_length": LENGTH}
    one = stack_of(**options)
    # Rounding a few times per layer.
    tolerance = 32 * float(jnp.finfo(policy).eps)
    for model in (one, one.with_scan(True)):
        step = jit(lambda x, cache, model=model: model.decode(x, cache))
        cache, parts = model.init_cache(2, 8), []
        for x in (X[:, :4], X[:, 4:5], X[:, 5:]):
            y, cache = step(jnp.asarray(x), cache)
            parts.append(np.asarray(to_array(y), np.float64))
        expected = jit(lambda x: to_array(one(x)))(X)
        found = np.concatenate(parts, axis=1)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=4 * tolerance)


def test_the_program_holds_one_layer() -> None:
    def length(count: int) -> int:
        stack = nnx.eval_shape(
            lambda: nn.TransformerStack(count, 8, 2, scan=True, rngs=nnx.Rngs(0))
        )
        graphdef, state = nnx.split(stack)
        jaxpr = jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x).value)
        return len(str(jaxpr(state, jnp.ones((1, 3, 8)))).splitlines())

    assert length(2) == length(7)


def test_other_layers_and_state_that_changes() -> None:
    layers = [nn.Dropout(0.5, rngs=nnx.Rngs(i)) for i in range(2)]
    stack = nn.stack_layers(layers)
    assert nn.unstack_layers(stack)[1].rngs.count[...] == 0
    transformer = stack_of(dropout_rate=0.5, scan=True)
    first, second = transformer(X).value, transformer(X).value
    assert not np.array_equal(first, second)
    assert all(
        (count[...] == 2).all()
        for _, count in nnx.iter_graph(transformer.layers)
        if isinstance(count, nnx.RngCount)
    )
    transformer.eval()
    np.testing.assert_array_equal(transformer(X).value, transformer(X).value)
    assert not any(map(is_scaled, jax.tree.leaves(nnx.state(transformer))))


def stack(**options) -> nn.TransformerStack:
    return nn.TransformerStack(2, WIDTH, 2, is_causal=True, **options, rngs=nnx.Rngs(0))


def dense(inputs: int, outputs: int) -> nn.Dense:
    return nn.Dense(inputs, outputs, rngs=nnx.Rngs(0))


test_errors = refuses(
    [
        (ValueError, lambda: layer(activation="geglu"), "activation must be one of gelu"),
        (ValueError, lambda: layer(norm="batch"), "norm must be one of layer, rms"),
        (ValueError, lambda: layer(norm_placement="mid"), "norm_placement must be one of pre"),
        (ValueError, lambda: nn.TransformerLayer(WIDTH, 3, rngs=nnx.Rngs(0)), "num_heads must"),
        (ValueError, lambda: stack(residual_scheme="deep"), "scheme must .*mean 'depth'"),
        (ValueError, lambda: stack(remat="all"), "remat must be one of none"),
        (TypeError, lambda: stack(activatoin="gelu"), "activatoin"),
        (ValueError, lambda: stack().init_cache(1, 8), "a cache needs max_length="),
        (
            ValueError,
            lambda: stack(max_length=8).decode(inputs(), stack(max_length=8).init_cache(2, 8)[:1]),
            "zip",
        ),
        (ValueError, lambda: nn.Residual(dense(4, 5), tau=0), "tau must be positive"),
        (ValueError, lambda: nn.Residual(dense(4, 5), tau=1.0)(jnp.ones((2, 4))), "same shape"),
        (ValueError, lambda: nn.stack_layers([dense(2, 2), dense(2, 3)]), "got 2 that differ"),
        (ValueError, lambda: nn.stack_layers([]), "got 0 that differ"),
        (ValueError, lambda: nn.unstack_layers(nn.Dropout(0.0)), "stacked state"),
    ]
)

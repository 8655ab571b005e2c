"""A scan over stacked layers against the same layers one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.gradients import jit
from tests.modules import build
from tests.optimizers import scaled
from unitscale import nn
from unitscale.core import ScaledArray, is_scaled, to_array

WIDTH, TIME, LAYERS = 16, 6, 3
# Of three layers forward and backward, a dozen products and norms each, and what they amplify.
ROUNDINGS = 256
X = np.random.default_rng(0).normal(size=(2, TIME, WIDTH)).astype(np.float32)


def make(**options) -> nn.TransformerStack:
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
    "pre": {},
    "post": {"norm_placement": "post", "norm": "layer", "activation": "silu_glu"},
    "none": {"norm_placement": "none", "residual_scheme": "running_mean"},
    "fixed": {"residual_scheme": "fixed", "is_causal": False, "num_kv_heads": 1},
    "rotary": {"rotary_base": 1e4, "max_length": 12, "use_bias": False},
    "remat dropout": {"dropout_rate": 0.3, "remat": "dots"},
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_layers_one_by_one(name: str) -> None:
    """Masks of dropout included."""
    stack = make(**CASES[name])
    expected, found = values_and_gradients(stack), values_and_gradients(stack.with_scan(True))
    assert_same(found, expected, ROUNDINGS * 2.0**-24)


def test_in_16_bits() -> None:
    stack = make(policy="float16")
    expected, found = values_and_gradients(stack), values_and_gradients(stack.with_scan(True))
    assert_same(found, expected, ROUNDINGS * 2.0**-11)


@pytest.mark.parametrize(
    ("placement", "scale"),
    [("pre", None), ("post", 4.0), ("pre", np.float32([[[4]], [[0.5]]]))],
    ids=str,
)
def test_scaled_parameters_and_inputs(placement: str, scale) -> None:
    """As an optimizer makes them: its biases have one scale for all layers."""
    stack = make(norm_placement=placement)
    scanned = stack.with_scan(True)
    for model in (stack, scanned):
        tx = scaled(optax.sgd(0.1), weights=jnp.float32)
        nnx.update(model, tx.scale_params(nnx.state(model, nnx.Param)))
    kernel = scanned.layers.mlp.up.kernel.get_value()
    assert kernel.scale.shape == (LAYERS, 1, 1)
    x = X if scale is None else ScaledArray(jnp.asarray(X), scale)

    def output(model):
        graphdef, state = nnx.split(model)
        return jit(lambda state, x: to_array(nnx.merge(graphdef, state)(x)))(state, x)

    assert_same(output(scanned), output(stack), ROUNDINGS * 2.0**-24)


def test_conversion_both_ways() -> None:
    stack = make()
    scanned = stack.with_scan(True)
    back = scanned.with_scan(False)
    assert [layer.taus for layer in back.layers] == [layer.taus for layer in stack.layers]
    contexts = [layer.attention.context for layer in stack.layers]
    assert [layer.attention.context for layer in scanned.layer_list()] == contexts
    for a, b in zip(
        jax.tree.leaves(nnx.state(back)), jax.tree.leaves(nnx.state(stack)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    built = make(scan=True)
    assert jax.tree.structure(nnx.state(built)) == jax.tree.structure(nnx.state(scanned))


def test_construction_draws_the_same_parameters() -> None:
    stacks = [nn.TransformerStack(2, 8, 2, scan=scan, rngs=nnx.Rngs(0)) for scan in (False, True)]
    kernels = [layer.mlp.up.kernel[...] for layer in stacks[0].layers]
    np.testing.assert_array_equal(stacks[1].layers.mlp.up.kernel[...], np.stack(kernels))


def test_decoding() -> None:
    stack = make(max_length=TIME)
    scanned = stack.with_scan(True)
    caches = [s.init_cache(2, TIME) for s in (stack, scanned)]
    results = [
        jit(lambda x, cache, s=s: to_array(s.decode(x, cache)[0]))(jnp.asarray(X), cache)
        for s, cache in zip((stack, scanned), caches, strict=True)
    ]
    np.testing.assert_allclose(*results, rtol=1e-5)


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
    with pytest.raises(ValueError, match="layers of one structure; got 2 that differ"):
        nn.stack_layers([nn.Dense(2, 2, rngs=nnx.Rngs(0)), nn.Dense(2, 3, rngs=nnx.Rngs(0))])
    with pytest.raises(ValueError, match="got 0 that differ"):
        nn.stack_layers([])
    with pytest.raises(ValueError, match="expected a module with stacked state"):
        nn.unstack_layers(nn.Dropout(0.0))
    transformer = make(dropout_rate=0.5, scan=True)
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

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from unitscale import nn, ops, rules
from unitscale.nn._mlp import Activation

PLAIN = {"gelu": jax.nn.gelu, "silu": jax.nn.silu, "relu": jax.nn.relu, "tanh": jnp.tanh}


def product(dense: nn.Dense, x):
    return x @ dense.kernel.get_value() / dense.in_features**0.5 + dense.bias.get_value()


@pytest.mark.parametrize("name", PLAIN)
def test_plain(name) -> None:
    layer = nn.MLP(8, 12, 5, activation=name, mult=1.5, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (3, 8))
    factor = rules.elementwise(PLAIN[name], mult=1.5).fwd
    expected = product(layer.down, factor * PLAIN[name](1.5 * product(layer.up, x)))
    np.testing.assert_allclose(layer(x).value, expected, rtol=1e-4, atol=1e-4)
    assert layer.gate is None


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gated(name) -> None:
    layer = nn.MLP(8, 12, activation=f"{name}_glu", mult=1.5, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (3, 8))
    factor = rules.glu(PLAIN[name], mult=1.5).fwd
    hidden = factor * product(layer.up, x) * PLAIN[name](1.5 * product(layer.gate, x))
    np.testing.assert_allclose(layer(x).value, product(layer.down, hidden), rtol=1e-4, atol=1e-4)


def test_every_activation_is_an_op() -> None:
    for name in Activation.__args__:
        assert callable(getattr(ops, name))


@pytest.mark.parametrize("name", PLAIN)
def test_scale(name, assert_rms) -> None:
    """Hidden units have unit variance; the mean of gelu, silu and relu comes on top of it.

    The constraint leaves the gradient the ratio of the activation's factors.
    """
    ideal = rules.elementwise(PLAIN[name], constraint=None)
    z, weights = np.polynomial.hermite_e.hermegauss(200)
    mean = np.average(ideal.fwd * np.asarray(PLAIN[name](z)), weights=weights)
    assert_rms(
        lambda rngs: nn.MLP(64, 256, activation=name, rngs=rngs),
        (32, 64),
        out=(1 + mean**2) ** 0.5,
        grad=ideal.fwd / ideal.bwd[0],
        bias=0.01,  # the quadrature of relu, which has a kink, and its float32
    )


def test_scale_of_the_gated(assert_rms) -> None:
    """The gradients of the two halves add up."""
    ideal = rules.glu(jax.nn.silu, constraint=None)
    assert_rms(
        lambda rngs: nn.MLP(64, 256, activation="silu_glu", rngs=rngs),
        (32, 64),
        grad=(1 + (ideal.fwd / ideal.bwd[1]) ** 2) ** 0.5,
    )


def test_dropout_is_on_the_output() -> None:
    layer = nn.MLP(8, 12, dropout_rate=0.5, rngs=nnx.Rngs(params=0, dropout=1))
    x = jax.random.normal(jax.random.key(0), (30, 8))
    noisy, quiet = layer(x).value, layer(x, deterministic=True).value
    kept = noisy != 0
    assert 0 < np.mean(kept) < 1
    np.testing.assert_allclose(noisy[kept], 2 * quiet[kept], rtol=1e-5)


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"activation must be one of gelu, .*_glu; got 'swish'"):
        nn.MLP(8, 12, activation="swish", rngs=nnx.Rngs(0))


@pytest.mark.parametrize("activation", ["gelu", "silu_glu"])
@pytest.mark.parametrize("policy", ["fp8", "fp8_dynamic", "bfloat16"])
def test_hidden_units_in_8_bits_are_computed_again(policy: str, activation: str) -> None:
    """The backward has what the activation is of, and not what it gives.

    Other strategies have scales of hidden units, which would be read twice for them.
    """
    layer = nn.MLP(8, 12, activation=activation, policy=policy, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)
    x = jax.random.normal(jax.random.key(0), (3, 5, 8))

    def run(f, params, x):
        return jax.vjp(lambda params, x: f(nnx.merge(graphdef, params), x).value, params, x)

    y, pull = run(lambda layer, x: layer(x), params, x)
    hidden = [a for a in jax.tree.leaves(pull) if a.ndim > 2 and a.shape[-1] == 12]
    count = 1 + (layer.gate is not None) + (policy != "fp8")
    assert len(hidden) == count
    assert sum(a.dtype.itemsize == 1 for a in hidden) == (policy == "fp8_dynamic")

    def plain(layer, x):
        f, gate = getattr(ops, activation), layer.gate
        return layer.down(f(layer.up(x)) if gate is None else f(layer.up(x), gate(x)))

    expected, other = run(plain, params, x)
    np.testing.assert_array_equal(y, expected)
    jax.tree.map(np.testing.assert_array_equal, pull(y), other(y))


def test_another_layer_in_the_place_of_its_last() -> None:
    class Counted(nnx.Module):
        def __init__(self) -> None:
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x: ops.ArrayLike) -> ops.ArrayLike:
            self.calls.set_value(self.calls.get_value() + 1)
            return x

    layer = nn.MLP(8, 12, policy="fp8", rngs=nnx.Rngs(0))
    layer.down = Counted()

    @nnx.jit
    def apply(layer: nn.MLP) -> jax.Array:
        return layer(jnp.ones((2, 8))).value

    assert apply(layer).shape == (2, 12)
    assert layer.down.calls.get_value() == 1


def test_who_watches_layers_sees_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their class, as `nnx.tabulate` and the recipes' probe do: what is seen may be kept."""
    original, layer = nn.Dense.__call__, nn.MLP(8, 12, policy="fp8", rngs=nnx.Rngs(0))
    seen: list[jax.Array] = []

    def call(self: nn.Dense, x: ops.ArrayLike) -> ops.ArrayLike:
        y = original(self, x)
        seen.append(y.value)
        return y

    monkeypatch.setattr(nn.Dense, "__call__", call)

    @jax.jit
    def run(x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        return layer(x).value, seen

    y, (_, last) = run(jnp.ones((2, 8)))
    np.testing.assert_array_equal(last, y)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.bench.wire import collectives
from tests.gradients import jit
from tests.modules import build
from tests.parallel.devices import mesh_of, relative_error
from unitscale import nn, rules
from unitscale.parallel import param_shardings

from .models import Decoder

WIDTH, TIME = 16, 5


def inputs() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, TIME, WIDTH)).astype(np.float32)


def layer(**options) -> nn.TransformerLayer:
    return nn.TransformerLayer(WIDTH, 2, 24, **options, rngs=nnx.Rngs(0))


def test_an_unknown_activation() -> None:
    with pytest.raises(ValueError, match=r"activation must be one of gelu, .* got 'geglu'"):
        layer(activation="geglu")


@pytest.mark.parametrize("placement", ["pre", "post", "none"])
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


def test_norms() -> None:
    assert isinstance(layer(norm="layer").mlp_norm, nn.LayerNorm)
    assert isinstance(layer(norm="rms").attention_norm, nn.RMSNorm)
    assert layer(norm_placement="none").attention_norm is None


@pytest.mark.parametrize("scheme", rules.RESIDUAL_SCHEMES)
def test_a_stack_follows_its_scheme(scheme) -> None:
    settings = {"tau": 0.4, "mult": 0.7, "attention_ratio": 1.5, "scheme": scheme}
    settings = {f"residual_{key}": value for key, value in settings.items()}
    stack = build(lambda: nn.TransformerStack(3, WIDTH, 2, **settings, rngs=nnx.Rngs(0)))
    taus = rules.residual_taus(scheme, 6, tau=0.4, mult=0.7, attn_ratio=1.5)
    assert tuple(t for block in stack.layers for t in block.taus) == taus


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


def test_scale(assert_rms) -> None:
    """Every branch adds a unit vector in its share; only attention's rule is approximate."""
    assert_rms(
        lambda rngs: nn.TransformerLayer(32, 2, is_causal=True, taus=(0.5, 0.5), rngs=rngs),
        (2, 32, 32),
        # Beside the skip connection, what the branches give back: a norm, an activation and an
        # attention whose own excess the other tests pin.
        grad=_layer_gradient(32, 32, 2, 0.5),
        bias=0.15,
        trials=64,
    )


def _layer_gradient(width: int, time: int, heads: int, tau: float) -> float:
    attention = rules.dot_product_attention(width // heads, time, is_causal=True, constraint=None)
    gelu = rules.elementwise(jax.nn.gelu, constraint=None)
    branch = {
        "attention": 1 + 2 * (attention.fwd / attention.bwd[0]) ** 2,
        "mlp": (gelu.fwd / gelu.bwd[0]) ** 2,
    }
    share = rules.residual(tau)
    total = 1.0
    for square in branch.values():
        total *= share.branch**2 * square + share.skip**2
    return total**0.5


def test_errors() -> None:
    with pytest.raises(ValueError, match="norm must be one of layer, rms; got 'batch'"):
        layer(norm="batch")
    with pytest.raises(ValueError, match=r"norm_placement must be one of pre, .*; got 'mid'"):
        layer(norm_placement="mid")
    with pytest.raises(ValueError, match="num_heads must divide qkv_features"):
        nn.TransformerLayer(WIDTH, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"scheme must .*got 'deep'.*Did you mean 'depth'"):
        nn.TransformerStack(2, WIDTH, 2, residual_scheme="deep", rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="activatoin"):
        nn.TransformerStack(2, WIDTH, 2, activatoin="gelu", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="a cache needs max_length="):
        nn.TransformerStack(2, WIDTH, 2, is_causal=True, rngs=nnx.Rngs(0)).init_cache(1, 8)
    stack = nn.TransformerStack(2, WIDTH, 2, is_causal=True, max_length=8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="zip"):
        stack.decode(inputs(), stack.init_cache(2, 8)[:1])


MODELS = {
    "rope": {"rotary_base": 10000.0},
    "learned": {"learned": True, "tied": True},
    "grouped": {
        "rotary_base": 10000.0,
        "num_kv_heads": 2,
        "activation": "silu_glu",
        "norm": "layer",
    },
}


@pytest.mark.parametrize("policy", ["float32", "float16"])
@pytest.mark.parametrize("name", MODELS)
def test_cached_logits_are_the_uncached_ones(name, policy) -> None:
    model = build(lambda: Decoder(WIDTH, policy=policy, **MODELS[name]))
    ids = np.random.default_rng(1).integers(0, 11, (2, 7))
    uncached = np.asarray(jit(lambda ids: model(ids).value)(ids), np.float64)
    step = jit(model)
    # Rounding a few times per layer, relative to logits of RMS below 1.
    tolerance = 32 * float(jnp.finfo(policy).eps)
    for chunks in ((1,) * 7, (4, 3)):
        cache, start, parts = model.stack.init_cache(2, 8), 0, []
        for size in chunks:
            logits, cache = step(ids[:, start : start + size], cache)
            parts.append(np.asarray(logits.value, np.float64))
            start += size
        found = np.concatenate(parts, axis=1)
        np.testing.assert_allclose(found, uncached, rtol=tolerance, atol=tolerance)


def test_float32_gradients_are_those_of_float64() -> None:
    """The fused attention of `jax.nn`, which float64 leaves aside, has the same gradients."""
    ids = np.random.default_rng(1).integers(0, 11, (2, 7))

    def grads(policy):
        make = lambda: Decoder(WIDTH, policy=policy, **MODELS["grouped"])  # noqa: E731
        graphdef, params = nnx.split(build(make))
        single = jax.tree.map(lambda p: np.asarray(p, np.float32), params)
        cast = jax.tree.map(lambda p: p.astype(policy.param_dtype), single)
        run = jit(jax.grad(lambda p: nnx.merge(graphdef, p).loss(ids, ids)))
        return [np.asarray(g, np.float64) for g in jax.tree.leaves(run(cast))]

    single = grads(nn.Policy())
    with jax.enable_x64(True):
        double = grads(nn.Policy(param_dtype="float64", compute_dtype="float64"))
    eps = float(jnp.finfo(jnp.float32).eps)
    for a, b in zip(single, double, strict=True):
        assert np.linalg.norm(a - b) <= 64 * eps * np.linalg.norm(b)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("activation", ["gelu", "silu_glu"])
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

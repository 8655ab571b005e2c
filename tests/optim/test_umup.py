"""u-muP: learning-rate factors by role and shape, their table, independent weight decay."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.modules import build
from tests.refusals import refuses
from unitscale import nn, ops
from unitscale.optim import independent_weight_decay, muon_axes, umup, umup_rates


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nn.Embed(10, 16, rngs=rngs)
        self.block = nn.TransformerLayer(16, 2, 64, depth=4, norm="layer", rngs=rngs)
        self.norm = nn.RMSNorm(16)
        self.readout = nn.Readout(16, 10, use_bias=True, rngs=rngs)

    def __call__(self, ids):
        return self.readout(self.norm(self.block(self.embed(ids))))


EXPECTED = {
    "embed.embedding": 1 / 4,
    "norm.gain": 1,
    "readout.kernel": 1,
    "readout.bias": 1,
    **{f"block.attention.{p}.kernel": 1 / 8 for p in ("query", "key", "value", "out")},
    **{f"block.attention.{p}.bias": 1 / 2 for p in ("query", "key", "value", "out")},
    "block.mlp.up.kernel": 1 / 8,
    "block.mlp.down.kernel": 1 / 16,
    "block.mlp.up.bias": 1 / 2,
    "block.mlp.down.bias": 1 / 2,
    **{f"block.{n}_norm.{p}": 1 / 2 for n in ("attention", "mlp") for p in ("gain", "bias")},
}


def parameters(model=None):
    return nnx.state(build(Model) if model is None else model, nnx.Param)


def by_path(tree) -> dict[str, np.ndarray]:
    return {
        ".".join(map(str, path)): np.asarray(getattr(leaf, "get_value", lambda leaf=leaf: leaf)())
        for path, leaf in nnx.to_flat_state(tree)
    }


def ones(params):
    return jax.tree.map(lambda p: np.ones(p.shape, np.float32), params)


def updated(tx, params, grads, **extra):
    return jax.jit(lambda g, p: tx.update(g, tx.init(p), p, **extra))(grads, params)


def factors(updates) -> dict[str, float]:
    return {path: u.ravel()[0] for path, u in by_path(updates).items()}


def test_factor_of_every_parameter_and_the_optimizer_of_flax() -> None:
    model = build(Model)
    before = by_path(parameters(model))
    optimizer = nnx.Optimizer(model, umup(optax.sgd(1.0), parameters(model)), wrt=nnx.Param)
    nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))(
        model, optimizer, ones(parameters(model))
    )
    for path, x in by_path(parameters(model)).items():
        np.testing.assert_allclose(before[path] - x, EXPECTED[path], rtol=1e-4, err_msg=path)


def test_the_updates_of_the_inner_rule_are_multiplied_not_its_gradients() -> None:
    params = parameters()
    inner = optax.adam(0.1)
    grads = jax.tree.map(lambda p: np.cos(p + 1), params)
    plain, plain_state = updated(inner, params, grads)
    scaled, state = updated(umup(inner, params), params, grads)
    for path, u in by_path(plain).items():
        np.testing.assert_allclose(by_path(scaled)[path], EXPECTED[path] * u, rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, state, plain_state)


def test_multipliers_by_role() -> None:
    params = parameters()
    tx = umup(optax.identity(), params, multipliers={"embedding": 8.0, "norm": 0.5, "bias": 0.0})
    updates, _ = updated(tx, params, ones(params))
    times = {"embedding": 8.0, "gain": 0.5, "kernel": 1.0}
    expected = {
        path: factor * (0.5 if "norm" in path else times.get(path.rpartition(".")[2], 0.0))
        for path, factor in EXPECTED.items()
    }
    assert factors(updates) == pytest.approx(expected, rel=1e-6)


def test_plain_arrays_as_updates_and_extra_arguments() -> None:
    params = parameters()
    arrays = nnx.as_pure(params)
    updates, _ = updated(umup(optax.identity(), params), arrays, ones(arrays))
    assert factors(updates) == pytest.approx(EXPECTED, rel=1e-6)

    def update(updates, state, params=None, *, times, **_):
        return jax.tree.map(lambda u: times * u, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = optax.chain(umup(inner, params), optax.identity())
    updates, _ = updated(tx, params, ones(params), times=4.0)
    assert factors(updates)["embed.embedding"] == 1.0


class Chain(nnx.Module):
    """Make a model of embedding, layer and readout, with the given constraint of the readout."""

    def __init__(self, width: int, constraint: str | None):
        rngs = nnx.Rngs(0)
        self.embed = nn.Embed(12, width, rngs=rngs)
        self.dense = nn.Dense(width, width, use_bias=True, rngs=rngs)
        self.readout = nn.Readout(width, 12, use_bias=False, constraint=constraint, rngs=rngs)

    def loss(self, ids):
        logits = self.readout(self.dense(self.embed(ids)))
        return ops.softmax_cross_entropy(logits, ids * ids % 12)  # biases do not cancel


STEPS: dict[str, Any] = {
    "sgd": (optax.sgd(1.0), "sgd", None),
    "sgd, constrained readout": (optax.sgd(1.0), "sgd", "to_output_scale"),
    "adam": (optax.adam(1.0), "adam", None),
    "lion": (optax.lion(1.0), "adam", None),
    "muon": (None, "muon", None),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_of_one_size_at_every_width(name: str) -> None:
    """Check the RMS of steps of vectors and embeddings, and the spectral norm of kernels' steps."""
    tx, optimizer, constraint = STEPS[name]
    ids = jnp.arange(12)

    def steps(width: int) -> dict[str, np.ndarray]:
        graphdef, params = nnx.split(build(lambda: Chain(width, constraint)))
        inner = muon(params) if tx is None else tx
        own = umup(inner, params, optimizer=optimizer, readout_constraint=constraint)

        @jax.jit
        def step(params):
            grads = jax.grad(lambda params: nnx.merge(graphdef, params).loss(ids))(params)
            return own.update(grads, own.init(params), params)[0]

        return by_path(step(params))

    narrow, wide = steps(64), steps(256)
    for path in narrow:
        if path == "dense.kernel":
            # In proportion to fan_out^1/2, so that what the kernel adds to its output is as large.
            ratio = np.linalg.norm(wide[path], 2) / np.linalg.norm(narrow[path], 2) / 2
        else:
            ratio = np.sqrt(np.mean(wide[path] ** 2) / np.mean(narrow[path] ** 2))
        assert ratio == pytest.approx(0.5 if path == "embed.embedding" else 1.0, rel=0.2), path


def muon(params: Any) -> Any:
    axes = muon_axes(params)
    return optax.contrib.muon(1.0, consistent_rms=1.0, muon_weight_dimension_numbers=axes)


KERNELS = {  # shape, fan_in, fan_out
    "square": ((16, 16), 16, 16),
    "wide": ((8, 32), 8, 32),
    "tall": ((32, 8), 32, 8),
    "convolution": ((3, 4, 8), 12, 8),
    "stack": ((3, 8, 16), 8, 16),
    "heads": ((8, 2, 4), 8, 8),
}


def test_muon_moves_hidden_kernels_alone_by_orthogonal_steps() -> None:
    """All singular values of a hidden kernel's step are fan_out^1/2; other steps are Adam's."""
    draw = np.random.default_rng(0).standard_normal

    def variable(shape: Any, **metadata: Any) -> Any:
        return nnx.Param(jnp.array(draw(shape), jnp.float32), **metadata)

    fans = {"fan_in": 4, "fan_out": 16, "depth": 1}
    others = {role: variable((4, 16), role=role, **fans) for role in ("embedding", "readout")}
    others["odd"] = variable((4, 16), role="weight", **fans | {"fan_in": 2})
    kernels = {
        name: variable(shape, role="weight", fan_in=fan_in, fan_out=fan_out, depth=4)
        for name, (shape, fan_in, fan_out) in KERNELS.items()
    }
    params = nnx.State(others | kernels)
    tx = umup(muon(params), params, optimizer="muon")
    steps = by_path(jax.jit(lambda p: tx.update(p, tx.init(p), p)[0])(params))
    for name, (_, fan_in, fan_out) in KERNELS.items():
        values = np.linalg.svd(steps[name].reshape(-1, fan_in, fan_out), compute_uv=False)
        values /= np.sqrt(fan_out / 4)
        np.testing.assert_allclose(values, 0.9, atol=0.4, err_msg=name)  # five iterations
    for name, factor in {"embedding": 1 / 4, "readout": 1.0, "odd": 2**-0.5}.items():
        # The first step of Adam with Nesterov's momentum.
        expected = factor * (1 + 0.9 * 0.1 / 0.19)
        np.testing.assert_allclose(np.abs(steps[name]), expected, rtol=1e-3, err_msg=name)


def test_table_and_start() -> None:
    rates = umup_rates(parameters())
    plain = {rate.path: rate.plain for rate in rates}
    assert plain["block.mlp.up.kernel"] == pytest.approx(1 / 16 / 2)
    assert plain["readout.kernel"] == pytest.approx(1 / 16)
    assert plain["embed.embedding"] == EXPECTED["embed.embedding"]
    _, *rows, last = str(rates).splitlines()
    assert [row.split()[0] for row in rows] == [rate.path for rate in rates]
    assert f"{rates.start(1.0):.4g} x" in last


@pytest.mark.parametrize("rate", [1.0, 1e-3])
def test_the_share_depends_on_neither_rate_nor_schedule(rate: float) -> None:
    schedule = optax.linear_schedule(0.0, rate, 3)
    tx = optax.chain(optax.sgd(schedule), independent_weight_decay(0.125))
    params, zero = {"w": jnp.array([2.0, -4.0])}, {"w": jnp.zeros(2)}
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update(zero, state, params)
        np.testing.assert_array_equal(updates["w"], -0.125 * params["w"])


def named(shape: Any, **metadata: Any) -> Any:
    return {"w": nnx.Param(jnp.ones(shape), **metadata)}


SGD = optax.sgd(1.0)
WEIGHT = {"role": "weight", "fan_in": 3, "fan_out": 4, "depth": 1}
WRONG: list[tuple[str, Any]] = [
    ("params", lambda: umup_rates({"w": jnp.ones(3)})),
    ("params", lambda: muon_axes({"w": jnp.ones((3, 4))})),
    ("params", lambda: umup(SGD, named((3, 4)))),
    ("'weight'", lambda: umup(SGD, named(3, **WEIGHT | {"role": "wieght"}))),
    ("'embedding'", lambda: umup(SGD, {}, multipliers={"embeding": 2.0})),
    (r"multipliers\['bias'\]", lambda: umup(SGD, {}, multipliers={"bias": -1.0})),
    (r"multipliers\['norm'\]", lambda: umup(SGD, {}, multipliers={"norm": float("nan")})),
    ("updates", lambda: umup(SGD, named(3, **WEIGHT)).update({}, optax.EmptyState())),
]


test_refusals = refuses([(ValueError, call, message) for message, call in WRONG])

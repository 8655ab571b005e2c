"""Schedules and update rules follow the config."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from recipes.config import OptimizerConfig
from recipes.gpt.config import GPTConfig
from recipes.run.state import init_state, make_optimizer, make_schedule, updates_done
from unitscale.optim import ScaledTransformation

SLOW = pytest.mark.slow


def make(precision: Any = "float32", **optimizer: Any) -> GPTConfig:
    return GPTConfig.model_validate(
        {
            "name": "x",
            "precision": precision,
            "model": {"width": 8, "layers": 1, "heads": 2},
            "optimizer": {"schedule": "constant", "learning_rate": 0.5} | optimizer,
        }
    )


def test_schedule() -> None:
    for schedule, middle, last in (
        ("cosine", 0.55, 0.1),
        ("linear", 0.55, 0.1),
        ("constant", 1, 1),
    ):
        config = OptimizerConfig.model_validate(
            {"learning_rate": 1.0, "warmup_steps": 10, "schedule": schedule, "final_fraction": 0.1}
        )
        rate = make_schedule(config, 110)
        found = [float(np.asarray(rate(step))) for step in (0, 5, 10, 60, 110)]
        np.testing.assert_allclose(found, [0.0, 0.5, 1.0, middle, last], rtol=1e-6)


def updates(config: GPTConfig, params: Any, grads: Any) -> Any:
    @jax.jit
    def run(params: Any, grads: Any) -> Any:
        optimizer = make_optimizer(config, params)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    return run(params, grads)


@functools.cache
def params_of(scan: bool = False, **shape: Any) -> Any:
    """Return the parameters of the model that `make` builds."""
    config = make(umup=True)
    model = config.model.model_copy(update={"scan": scan} | shape)
    return init_state(config.model_copy(update={"model": model}))[2].params


PARAMS = {"kernel": jnp.full((3, 4), 2.0), "gain": jnp.full((4,), 2.0)}
GRADS = jax.tree.map(lambda p: jnp.full_like(p, 3.0), PARAMS)


FEW = {"weights": "float16", "moments": ["float16", "float16"]}


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "muon", "clip_norm": 1.0, "precision": FEW},
        pytest.param({"name": "sgd", "b1": 0.0, "umup": False}, marks=SLOW),
        pytest.param({"name": "adamw", "clip_norm": 1.0, "weight_decay": 0.1}, marks=SLOW),
        pytest.param({"name": "lion"}, marks=SLOW),
    ],
    ids=str,
)
def test_updates_are_counted(settings: dict[str, Any]) -> None:
    config = make(**settings)
    optimizer = make_optimizer(config, params_of())
    scales = isinstance(optimizer, ScaledTransformation)
    params = optimizer.scale_params(params_of()) if scales else params_of()
    state = optimizer.init(params)
    assert updates_done(state) == 0
    after = jax.jit(lambda *told: optimizer.update(*told)[1])(params_of(), state, params)
    assert updates_done(after) == 1


def test_sgd_clipping_and_decay_of_matrices_alone() -> None:
    out = updates(make(name="sgd", b1=0.0, umup=False), PARAMS, GRADS)
    np.testing.assert_allclose(out["kernel"], -1.5)
    out = updates(make(name="sgd", b1=0.0, umup=False, clip_norm=1.0), PARAMS, GRADS)
    assert float(optax.tree.norm(out)) == pytest.approx(0.5, rel=1e-5)
    for name in ("adamw", "lion"):
        out = updates(make(name=name, umup=False, weight_decay=0.1), PARAMS, GRADS)
        np.testing.assert_allclose(out["kernel"], -0.5 * (1 + 0.1 * 2.0), rtol=1e-5)
        np.testing.assert_allclose(out["gain"], -0.5, rtol=1e-5)
    with pytest.raises(ValueError, match="params must be variables with role"):
        make_optimizer(make(), PARAMS)


@pytest.mark.parametrize(
    ("settings", "eps"), [({}, 2.0**-12), ({"umup": False}, 1e-8), ({"eps": 0.5}, 0.5)]
)
def test_eps_of_adam_fits_the_size_of_gradients(settings: dict[str, Any], eps: float) -> None:
    config, steps = make(name="adam", **settings), []
    for size in (eps, 1e4 * max(eps, 1.0)):
        out = updates(config, params_of(), jax.tree.map(lambda p, s=size: p * 0 + s, params_of()))
        steps.append(out["readout"]["kernel"][...])
    # The first step of Adam is g / (|g| + eps).
    np.testing.assert_allclose(steps[0] / steps[1], 0.5, rtol=1e-3)


@pytest.mark.parametrize("scan", [False, pytest.param(True, marks=SLOW)])
def test_muon_moves_hidden_kernels_as_the_rule_says(scan: bool) -> None:
    out = nnx.to_pure_dict(updates(make(name="muon"), params_of(scan), params_of(scan)))
    layers = out["stack"]["layers"]
    down = (layers if scan else layers[0])["mlp"]["down"]["kernel"]  # 32 to 8, in 2 branches
    values = np.linalg.svd(np.asarray(down).reshape(32, 8), compute_uv=False)
    values /= 0.5 / 32 * (8 / 2) ** 0.5  # learning rate, Muon's RMS, fan-out and depth
    np.testing.assert_allclose(values, 0.9, atol=0.4)
    first = 1 + 0.9 * 0.1 / 0.19  # step of Adam, with Nesterov's momentum
    size = float(np.abs(out["embed"]["embedding"]).max())
    assert size == pytest.approx(0.5 * 8**-0.5 * first, rel=0.01)


@pytest.mark.parametrize(("scan", "umup"), [(True, True), pytest.param(False, False, marks=SLOW)])
def test_decay_leaves_out_gains_and_biases_of_a_stack_too(scan: bool, umup: bool) -> None:
    config = make(name="adamw", umup=umup, weight_decay=0.1)
    ones = jax.tree.map(jnp.ones_like, params_of(scan, bias=True, norm="layer"))
    out = updates(config, ones, jax.tree.map(jnp.zeros_like, ones))
    leaves = [leaf for _, leaf in nnx.to_flat_state(out)]
    decays = {(leaf.role, bool(np.any(leaf.get_value()))) for leaf in leaves}
    matrices = {"weight", "readout", "embedding"}
    assert decays == {(role, role in matrices) for role in (*matrices, "bias", "norm")}


@pytest.mark.parametrize(("name", "rate"), [("adamw", 0.5), ("lion", 0.001), ("muon", 0.5)])
def test_decay_under_umup_depends_on_neither_learning_rate_nor_role(name: str, rate: float) -> None:
    params = params_of()
    config = make(name=name, learning_rate=rate, weight_decay=0.01)
    moved = updates(config, params, jax.tree.map(jnp.zeros_like, params))
    shares = nnx.to_pure_dict(jax.tree.map(jnp.divide, moved, params))
    np.testing.assert_allclose(shares["readout"]["kernel"], -0.01, rtol=1e-5)
    np.testing.assert_allclose(shares["embed"]["embedding"], -0.01, rtol=1e-5)
    np.testing.assert_allclose(shares["norm"]["gain"], 0.0)


def test_umup_gives_each_role_its_rate() -> None:
    large = jax.tree.map(lambda p: jnp.full_like(p, 1e4), params_of())  # beside eps

    def rates(config: GPTConfig) -> dict[str, float]:
        out = nnx.to_pure_dict(updates(config, params_of(), large))
        found = {
            "embedding": out["embed"]["embedding"],
            "readout": out["readout"]["kernel"],
            "norm": out["norm"]["gain"],
        }
        return {role: float(np.abs(update).max()) for role, update in found.items()}

    # u-muP, table 2: embedding fan-out^-1/2, readout and norm 1, but gains learn slower here
    expected = {"embedding": 0.5 * 8**-0.5, "readout": 0.5, "norm": 0.5 * 0.03}
    assert rates(make()) == pytest.approx(expected, rel=1e-5)
    expected["embedding"] *= 4.0
    assert rates(make(multipliers={"embedding": 4.0})) == pytest.approx(expected, rel=1e-5)


def test_formats_of_weights_and_moments() -> None:
    moments = ["float8_e4m3fn", "float16"]
    _, optimizer, state = init_state(make({"weights": "float16", "moments": moments}))
    assert isinstance(optimizer, ScaledTransformation)
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(state.params)}
    assert dtypes == {"float16", "float32"}  # data and scales
    found = {
        (field, leaf.dtype.name)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)
        for field in ("mu", "nu")
        if f".{field}" in jax.tree_util.keystr(path) and leaf.ndim
    }
    assert found == {("mu", "float8_e4m3fn"), ("nu", "float16")}
    _, optimizer, state = init_state(make({"moments": moments}))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    assert not isinstance(init_state(make())[1], ScaledTransformation)

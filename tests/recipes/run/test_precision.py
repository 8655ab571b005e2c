"""The sections `precision` and `optimizer`: presets, scales, schedules and update rules."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from recipes.config import OptimizerConfig
from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.gpt.task import build
from recipes.run.state import (
    LossScale,
    TrainState,
    init_state,
    load_trained,
    make_optimizer,
    make_policy,
    make_schedule,
    updates_done,
)
from recipes.run.step import make_evaluation, make_train_step
from tests.products import products
from unitscale import nn
from unitscale.nn import AmaxState
from unitscale.optim import ScaledTransformation
from unitscale.quant import QuantState, Static, Unit

from ..conftest import MakeConfig
from ..runs import read_metrics, run

OURS = ("model.library=unitscale", "optimizer.umup=true")
FP8 = (*OURS, "precision=fp8")
DELAYED = (*OURS, "precision=fp8_delayed")
BATCH = np.arange(4 * 17, dtype=np.int32).reshape(4, 17)


def test_a_preset_is_a_section_whose_keys_may_change(make_config: MakeConfig) -> None:
    preset = make_config(*OURS, "precision=fp8_5_bytes").precision
    assert (preset.policy, preset.weights, preset.rounding) == ("fp8", "float16", "stochastic")
    words = ("precision=fp8_5_bytes", "precision.rounding=nearest")
    for order in (words, words[::-1]):
        changed = make_config(*OURS, *order).precision
        assert changed == preset.model_copy(update={"rounding": "nearest"})
    again = make_config(*OURS, "precision=fp8_5_bytes", "precision=bfloat16").precision
    assert again.model_dump(exclude_defaults=True) == {"policy": "bfloat16"}


MISTAKES = [
    ((*OURS, "precision=bfloat16", "precision.monitor=0.1"), "monitor needs policy fp8 or fp8_d"),
    ((*OURS, "precision=fp8_dynamic", "precision.monitor=0.1"), "got policy fp8_dynamic"),
    ((*DELAYED, "precision.monitor=0.1", "precision.rebalance=true"), "rebalance needs monitor"),
    ((*FP8, "precision.monitor=1.5"), r"precision\.monitor"),
    ((*OURS, "precision.readout=true"), "readout needs an FP8 policy"),
    ((*DELAYED, "precision.readout=gradients"), "readout gradients needs a policy without"),
    ((*OURS, "precision=scalify_float16"), "need a plain model"),
    ((*OURS, "precision.matmuls=qwix"), "plain"),
    (("precision.policy=fp8",), r"precision\.policy"),
    (("precision.rounding=stochastic",), "rounding stochastic needs weights or moments"),
    (("precision=scalify_float16", "precision.weights=float16"), "scalify needs weights"),
    (("precision=scalify_float16", "precision.gradients=bfloat16"), "scalify needs .*gradients"),
    (("precision.matmuls=fp8",), "matmuls fp8 needs scalify"),
    (("precision=scalify_float16", "precision.matmuls=qwix"), "needs scalify null"),
    (("precision.frozen=float8_e4m3fn",), r"precision\.frozen needs lora"),
    (("precision.exchange=float32",), r"precision\.exchange needs a mesh"),
    (("precision.loss_scale=dynamic", "optimizer.skip_nonfinite=1"), "loss_scale dynamic needs"),
    (("precision.scalify=float16", "precision.policy=float16"), "scalify needs policy float32"),
    (("data.micro_batches=3",), r"data\.micro_batches .* must divide data\.batch_size"),
    (("lora={}",), r"lora needs init"),
    (("precision.initial=float8_e4m3fn",), r"initial needs model\.library unitscale"),
]


def test_keys_that_do_not_agree(make_config: MakeConfig) -> None:
    for words, message in MISTAKES:
        with pytest.raises(RecipeError, match=message):
            make_config(*words)


def test_the_readout_is_quantized_if_asked(make_config: MakeConfig) -> None:
    def policy(*words: str) -> nn.Policy:
        return make_policy(make_config(*FP8, *words).precision)

    assert policy().matmul_for("readout") is None
    kernel = jnp.ones((2, 3))
    for monitor, strategy in (((), Unit()), (("precision.monitor=0.1",), Static())):
        own = policy("precision.readout=true", *monitor).matmul_for("readout")
        assert own is not None
        assert (own.rhs, own.cotangent, own.strategy) == ("float8_e4m3fn", "float8_e5m2", strategy)
        gradients = policy("precision.readout=gradients", *monitor)
        assert gradients.matmul_for("readout") is None
        config = gradients.in_loss(kernel)[1]["config"]
        assert (config.cotangent, config.strategy) == ("float8_e5m2", Unit())


def watched(config: GPTConfig) -> tuple[list[dict], str, list[QuantState]]:
    """Return the metrics, the output, and the final states of quantized matmuls."""
    outcome, said = run(config)
    _, state = load_trained(config, print)
    own = nnx.to_flat_state(nnx.filter_state(state.rest, AmaxState))
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    return rows, said, [variable.get_value() for _, variable in own]


def shares(row: dict) -> dict[str, float]:
    return {key: value for key, value in row.items() if key.startswith("saturated/")}


@pytest.mark.slow
def test_shares_are_metrics_and_move_scales_only_if_asked(make_config: MakeConfig) -> None:
    """The learning rate is large enough for weights to exceed 448."""
    words, monitor = (*FP8, "optimizer.learning_rate=1000.0"), "precision.monitor=1e-4"
    unwatched, said_unwatched, none = watched(make_config(*words, "name=plain"))
    seen, said_seen, still = watched(make_config(*words, "name=seen", monitor))
    moved, said, states = watched(
        make_config(*words, "name=moved", monitor, "precision.rebalance=true")
    )
    logged = [row for row in seen if "loss" in row]
    # query, key, value, out, up and down, three tensors each
    assert {len(shares(row)) for row in logged} == {18}
    assert "saturated/stack.layers.0.mlp.up.rhs" in logged[0]
    assert all(0 <= share <= 1 for row in logged for share in shares(row).values())
    assert max(shares(logged[-1]).values()) > 1e-4
    # Counting changes no number, and there is none of it without a monitor.
    assert [row["loss"] for row in unwatched if "loss" in row] == [row["loss"] for row in logged]
    assert not any(map(shares, unwatched))
    assert none == []
    assert all(np.all(np.asarray(state.scale) == 1) for state in still)
    scales = np.stack([state.scale for state in states])
    assert np.any(scales > 1)
    assert np.all(np.frexp(scales)[0] == 0.5)
    assert "saturated, scale now 2\n" in said
    assert "scale now" not in said_unwatched + said_seen
    assert [row.get("loss") for row in moved] != [row.get("loss") for row in unwatched]


def steps(config: GPTConfig, state: TrainState, count: int) -> list[TrainState]:
    """Return all states of a run, the initial one included."""
    graphdef, optimizer, _ = init_state(config)
    step = make_train_step(graphdef, optimizer, config)
    states = [state]
    for index in range(count):
        state, _ = step(jax.tree.map(jnp.copy, states[-1]), BATCH, np.int32(index))
        states.append(state)
    return states


def same(one: TrainState, other: TrainState) -> bool:
    kept = [jax.tree.leaves((state.params, state.opt_state)) for state in (one, other)]
    return all(np.array_equal(a, b) for a, b in zip(*kept, strict=True))


@pytest.mark.slow
def test_a_constant_loss_scale_changes_no_bit(make_config: MakeConfig) -> None:
    """The loss scale is a power of two, and nothing underflows."""
    ended = []
    for words in ((), ("precision.loss_scale=1024.0",)):
        config = make_config("model.dropout=0.0", *words)
        ended.append(steps(config, init_state(config)[2], 2)[-1])
    assert same(*ended)


def test_a_dynamic_loss_scale_follows_the_gradients(make_config: MakeConfig) -> None:
    """The loss is near 5: it overflows times 2^127, and does not times 2^125."""
    config = make_config("precision.loss_scale=dynamic")
    state = init_state(config)[2]
    assert state.loss_scale == LossScale(jnp.float32(2.0**16), jnp.int32(0))
    assert init_state(make_config())[2].loss_scale is None
    state = state._replace(loss_scale=LossScale(jnp.float32(2.0**127), jnp.int32(0)))
    states = steps(config, state, 4)
    scales = [state.loss_scale for state in states if state.loss_scale is not None]
    found = [(float(np.log2(scale.value)), int(scale.good)) for scale in scales]
    assert found == [(127, 0), (126, 0), (125, 0), (125, 1), (125, 2)]
    assert [int(state.step) for state in states] == list(range(5))
    assert [same(*pair) for pair in itertools.pairwise(states)] == [True, True, False, False]
    last = LossScale(jnp.float32(4), jnp.int32(1999)).after(jnp.bool_(True))
    assert (float(last.value), int(last.good)) == (8, 0)


SCALIFIED = ("precision=scalify_fp8", "model.dropout=0.0")


def batch_of(config: GPTConfig) -> np.ndarray:
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.int32)


def test_matmuls_of_linear_layers_are_in_fp8_under_scalify(make_config: MakeConfig) -> None:
    config = make_config(*SCALIFIED, "model.layers=2")
    graphdef, _, state = init_state(config)
    evaluate = make_evaluation(graphdef, config.precision)
    program = jax.make_jaxpr(evaluate)(state.params, state.rest, batch_of(config))
    types = [{*operands} for _, *operands in products(program.jaxpr)]
    # Six linear layers in each of two blocks; readout and attention stay in float16.
    assert types.count({"float8_e4m3fn"}) == 2 * 6
    assert len(types) == 2 * 6 + 1 + 2 * 2
    # Outside of scalify the markers are identities.
    ids, targets = np.split(batch_of(config)[:, :16], 2, axis=1)
    loss = nnx.jit(lambda model: model.loss(ids, targets))
    marked, unmarked = (build(make_config(*words)) for words in (SCALIFIED, SCALIFIED[1:]))
    assert float(loss(marked)) == float(loss(unmarked))


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_updates_are_counted(name: str) -> None:
    config = make({"weights": "float16", "moments": ["float16"] * 2}, name=name, clip_norm=1.0)
    optimizer = make_optimizer(config, params_of())
    assert isinstance(optimizer, ScaledTransformation)
    params = optimizer.scale_params(params_of())
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


def test_muon_moves_hidden_kernels_at_its_own_rate() -> None:
    out = nnx.to_pure_dict(updates(make(name="muon"), params_of(), params_of()))
    down = out["stack"]["layers"][0]["mlp"]["down"]["kernel"]  # 32 to 8, in 2 branches
    values = np.linalg.svd(np.asarray(down), compute_uv=False)
    values /= 0.5 / 32 * (8 / 2) ** 0.5  # learning rate, Muon's RMS, fan-out and depth
    np.testing.assert_allclose(values, 0.9, atol=0.4)


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
    # u-muP, table 2: embedding fan-out^-1/2, readout and norm 1, but gains learn slower here
    for multipliers, embedding in (({}, 1.0), ({"embedding": 4.0}, 4.0)):
        out = nnx.to_pure_dict(updates(make(multipliers=multipliers), params_of(), large))
        found = (out["embed"]["embedding"], out["readout"]["kernel"], out["norm"]["gain"])
        rates = [float(np.abs(update).max()) for update in found]
        assert rates == pytest.approx([embedding * 0.5 * 8**-0.5, 0.5, 0.5 * 0.03], rel=1e-5)


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

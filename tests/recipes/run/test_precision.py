"""The `precision` section: presets, the readout, scalify, loss scales and the monitor."""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.gpt.task import build
from recipes.run.state import LossScale, TrainState, init_state, load_trained, make_policy, plain
from recipes.run.step import make_evaluation, make_train_step
from tests.products import products
from unitscale import nn
from unitscale.core import ScaledArray, is_scaled
from unitscale.nn import AmaxState
from unitscale.quant import QuantState, Static, Unit

from ..runs import read_metrics, run

MakeConfig = Callable[..., GPTConfig]
OURS = ("model.library=unitscale", "optimizer.umup=true")
FP8 = (*OURS, "precision=fp8")
DELAYED = (*OURS, "precision=fp8_delayed")
BATCH = np.arange(4 * 17, dtype=np.int32).reshape(4, 17)


def test_a_preset_is_a_section_whose_keys_may_change(make_config: MakeConfig) -> None:
    preset = make_config(*OURS, "precision=fp8_5_bytes").precision
    assert (preset.policy, preset.weights, preset.rounding) == ("fp8", "float16", "stochastic")
    changed = make_config(*OURS, "precision=fp8_5_bytes", "precision.rounding=nearest").precision
    assert changed == preset.model_copy(update={"rounding": "nearest"})
    again = make_config(*OURS, "precision=fp8_5_bytes", "precision=bfloat16").precision
    assert again.model_dump(exclude_defaults=True) == {"policy": "bfloat16"}


MISTAKES = [
    (
        (*OURS, "precision=bfloat16", "precision.monitor=0.1"),
        "monitor needs policy fp8 or fp8_d",
    ),
    ((*OURS, "precision=fp8_dynamic", "precision.monitor=0.1"), "got policy fp8_dynamic"),
    ((*DELAYED, "precision.monitor=0.1", "precision.rebalance=true"), "rebalance needs monitor"),
    ((*FP8, "precision.monitor=1.5"), r"precision\.monitor"),
    ((*OURS, "precision.readout=true"), "readout needs an FP8 policy"),
    ((*DELAYED, "precision.readout=gradients"), "readout gradients needs a policy without"),
    (("precision.rounding=stochastic",), "rounding stochastic needs weights or moments"),
    (("precision=scalify_float16", "precision.weights=float16"), "scalify stores weights"),
    (("precision=scalify_float16", "precision.gradients=bfloat16"), "scalify stores gradients"),
    (("precision.matmuls=fp8",), "matmuls fp8 needs scalify"),
    (("precision=scalify_float16", "precision.matmuls=qwix"), "needs scalify null"),
    (("precision.frozen=float8_e4m3fn",), r"precision\.frozen needs lora"),
    (("precision.exchange=float32",), r"precision\.exchange needs mesh"),
    (("precision.loss_scale=dynamic", "optimizer.skip_nonfinite=1"), "loss_scale dynamic needs"),
    ((*OURS, "precision=scalify_float16"), "are for plain models"),
    (("precision.scalify=float16", "precision.policy=float16"), "scalify needs policy float32"),
    (("data.micro_batches=3",), r"data\.micro_batches .* must divide data\.batch_size"),
]


@pytest.mark.parametrize(("words", "message"), MISTAKES)
def test_keys_that_do_not_agree(
    make_config: MakeConfig, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        make_config(*words)


def test_the_readout_is_quantized_if_asked(make_config: MakeConfig) -> None:
    def policy(*words: str) -> nn.Policy:
        return make_policy(make_config(*FP8, *words).precision)

    own = policy("precision.readout=true").matmul_for("readout")
    seen = policy("precision.readout=true", "precision.monitor=0.1").matmul_for("readout")
    assert policy().matmul_for("readout") is None
    assert own is not None
    assert seen is not None
    assert (own.rhs, own.cotangent) == ("float8_e4m3fn", "float8_e5m2")
    assert (own.strategy, seen.strategy) == (Unit(), Static())
    kernel = jnp.ones((2, 3))
    assert policy().in_loss(kernel)[1] == {"config": None}
    for more in ((), ("precision.monitor=0.1",)):
        gradients = policy("precision.readout=gradients", *more)
        assert gradients.matmul_for("readout") is None
        _, formats = gradients.in_loss(kernel)
        assert formats["logits_dtype"] == gradients.compute_dtype
        assert (formats["config"].cotangent, formats["config"].strategy) == ("float8_e5m2", Unit())


def test_a_monitor_changes_policies_of_unit_scales_alone(make_config: MakeConfig) -> None:
    monitor = "precision.monitor=0.1"
    assert make_policy(make_config(*DELAYED, monitor).precision) == nn.as_policy("fp8_delayed")
    assert make_policy(make_config(*FP8).precision) == nn.as_policy("fp8")
    assert make_policy(make_config(*FP8, monitor).precision) != nn.as_policy("fp8")


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


def test_a_constant_loss_scale_changes_no_bit(make_config: MakeConfig) -> None:
    """The loss scale is a power of two, and nothing underflows."""
    words = ("model.dropout=0.0",)
    config = make_config(*words)
    scaled = make_config(*words, "precision.loss_scale=1024.0")
    expected = steps(config, init_state(config)[2], 2)[-1]
    assert same(steps(scaled, init_state(scaled)[2], 2)[-1], expected)


def test_a_dynamic_loss_scale_follows_the_gradients(make_config: MakeConfig) -> None:
    """The loss is near 5: it overflows times 2^127, and does not times 2^125."""
    config = make_config("precision.loss_scale=dynamic")
    state = init_state(config)[2]
    assert state.loss_scale is not None
    assert (float(state.loss_scale.value), int(state.loss_scale.good)) == (2.0**16, 0)
    assert init_state(make_config())[2].loss_scale is None
    state = state._replace(loss_scale=LossScale(jnp.float32(2.0**127), jnp.int32(0)))
    states = steps(config, state, 4)
    scales = [state.loss_scale for state in states if state.loss_scale is not None]
    found = [(float(np.log2(scale.value)), int(scale.good)) for scale in scales]
    assert found == [(127, 0), (126, 0), (125, 0), (125, 1), (125, 2)]
    assert [int(state.step) for state in states] == list(range(5))
    assert [same(*pair) for pair in itertools.pairwise(states)] == [
        True,
        True,
        False,
        False,
    ]
    last = LossScale(jnp.float32(4), jnp.int32(1999)).after(jnp.bool_(True))
    assert (float(last.value), int(last.good)) == (8, 0)


SCALIFIED = ("precision=scalify_fp8", "model.dropout=0.0")


def batch_of(config: GPTConfig) -> np.ndarray:
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.int32)


@pytest.mark.slow
def test_losses_under_scalify_follow_the_plain_program(make_config: MakeConfig) -> None:
    def losses(*words: str) -> list[float]:
        config = make_config("model.dropout=0.0", *words)
        graphdef, optimizer, state = init_state(config)
        step, batch = make_train_step(graphdef, optimizer, config), batch_of(config)
        found = []
        for index in range(4):
            state, values = step(state, batch, np.int32(index))
            found.append(float(values["loss"]))
        assert step._cache_size() == 1, "the second step has the types of the first"
        return found

    expected = losses()
    assert expected[-1] < expected[0]
    # float32 rounds in another order; float16 and FP8 round each matmul to 2^-11 and 2^-4.
    for storage, tolerance in (("float32", 1e-5), ("float16", 2e-3)):
        np.testing.assert_allclose(losses(f"precision.scalify={storage}"), expected, rtol=tolerance)
    found = losses("precision=scalify_fp8")
    np.testing.assert_allclose(found, expected, rtol=2e-2)
    assert np.max(np.abs(np.asarray(found) - expected)) > 1e-6, "FP8 has an effect"


def test_state_under_scalify_is_in_its_format(make_config: MakeConfig) -> None:
    config = make_config("precision=scalify_float16")
    state = init_state(config)[2]
    leaves = jax.tree.leaves(state, is_leaf=is_scaled)
    floating = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
    assert floating
    assert all(isinstance(x, ScaledArray) and x.dtype == jnp.float16 for x in floating)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=2**-11),
        plain(config.precision, state.params),
        init_state(make_config())[2].params,
    )


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
    batch = batch_of(config)
    marked, unmarked = (build(make_config(*words)) for words in (SCALIFIED, SCALIFIED[1:]))
    x, y = (model.loss(batch[:, :-1], batch[:, 1:]) for model in (marked, unmarked))
    assert float(x) == float(y)

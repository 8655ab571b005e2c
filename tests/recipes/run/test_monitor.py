"""Saturated elements are metrics, and move scales where the config says so."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.run.monitor import monitored
from recipes.run.report import read_metrics
from recipes.run.state import load_trained
from unitscale import nn
from unitscale.nn import AmaxState
from unitscale.quant import QuantState, Static, Unit

from ..runs import run

MakeConfig = Callable[..., GPTConfig]
FP8 = ["model.library=unitscale", "policy=fp8", "optimizer={learning_rate: 1000.0}"]


def watched(config: GPTConfig) -> tuple[list[dict], str, list[QuantState]]:
    """The metrics, what was said, and the states of quantized products at the end."""
    outcome, said = run(config)
    _, state = load_trained(config, print)
    own = nnx.to_flat_state(nnx.filter_state(state.rest, AmaxState))
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    return rows, said, [variable.get_value() for _, variable in own]


def shares(row: dict) -> dict[str, float]:
    return {key: value for key, value in row.items() if key.startswith("saturated/")}


def test_the_readout_is_quantized_if_asked(make_config: MakeConfig) -> None:
    plain = monitored(make_config(*FP8)).matmul_for("readout")
    own = monitored(make_config(*FP8, "fp8_readout=true")).matmul_for("readout")
    seen = monitored(make_config(*FP8, "fp8_readout=true", "monitor={}")).matmul_for("readout")
    assert plain is None
    assert own is not None
    assert seen is not None
    assert (own.rhs, own.cotangent) == ("float8_e4m3fn", "float8_e5m2")
    assert (own.strategy, seen.strategy) == (Unit(), Static())


def test_the_gradients_of_the_readout_are_quantized_alone(make_config: MakeConfig) -> None:
    """Without standing scales, whatever is monitored; if told so."""
    kernel = jnp.ones((2, 3))
    assert monitored(make_config(*FP8)).in_loss(kernel)[1] == {"config": None}
    for more in ((), ("monitor={}",)):
        policy = monitored(make_config(*FP8, "fp8_readout=gradients", *more))
        assert policy.matmul_for("readout") is None
        _, formats = policy.in_loss(kernel)
        assert formats["logits_dtype"] == policy.compute_dtype
        assert (formats["config"].cotangent, formats["config"].strategy) == ("float8_e5m2", Unit())


@pytest.mark.slow
def test_shares_are_metrics_and_move_scales_only_if_asked(make_config: MakeConfig) -> None:
    """Steps of this size bring weights beyond 448."""
    plain, said_plain, none = watched(make_config(*FP8, "name=plain"))
    seen, said_seen, still = watched(make_config(*FP8, "name=seen", "monitor={}"))
    moved, said, states = watched(make_config(*FP8, "name=moved", "monitor={rebalance: true}"))
    logged = [row for row in seen if "loss" in row]
    # query, key, value, out, up and down, three tensors each
    assert {len(shares(row)) for row in logged} == {18}
    assert "saturated/stack.layers.0.mlp.up.rhs" in logged[0]
    assert all(0 <= share <= 1 for row in logged for share in shares(row).values())
    assert max(shares(logged[-1]).values()) > 1e-4
    # Counting changes no number, and there is none of it without a monitor.
    assert [row["loss"] for row in plain if "loss" in row] == [row["loss"] for row in logged]
    assert not any(map(shares, plain))
    assert none == []
    assert all(np.all(np.asarray(state.scale) == 1) for state in still)
    scales = np.stack([state.scale for state in states])
    assert np.any(scales > 1)
    assert np.all(np.frexp(scales)[0] == 0.5)
    assert "saturated, scale now 2\n" in said
    assert "scale now" not in said_plain + said_seen
    assert [row.get("loss") for row in moved] != [row.get("loss") for row in plain]


def test_policies_without_a_scale_to_watch_are_as_they_are(make_config: MakeConfig) -> None:
    config = make_config("model.library=unitscale", "policy=fp8_delayed", "monitor={}")
    assert monitored(config) == nn.as_policy("fp8_delayed")
    assert monitored(make_config(*FP8)) == nn.as_policy("fp8")
    assert monitored(make_config(*FP8, "monitor={}")) != nn.as_policy("fp8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["policy=bfloat16", "monitor={}"], "monitor needs a policy whose scales .* got policy bf"),
        (["policy=fp8_dynamic", "monitor={}"], "fp8 or fp8_delayed; got policy fp8_dynamic"),
        (["policy=fp8_delayed", "monitor={rebalance: true}"], "rebalance needs policy fp8; got"),
        (["policy=fp8", "monitor={limit: 1.5}"], "monitor.limit"),
    ],
)
def test_mistakes(make_config: MakeConfig, words: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        make_config("model.library=unitscale", *words)

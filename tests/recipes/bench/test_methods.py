"""`bench methods`: loss scales, what methods cost, reuse of runs, and the command."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rich.console import Console

from recipes.bench import _loss_scale, methods
from recipes.bench._loss_scale import (
    LoopState,
    automatic,
    first_state,
    make_step,
    scaled_gradient,
    trained_with,
)
from recipes.cli import main
from recipes.text import load_corpus
from recipes.errors import RecipeError
from recipes.gpt import build

CONSOLE = Console(quiet=True)
UNIT = ("model.library=unitscale", "model.dropout=0.0", "train.steps=2")


def loss(slope: Any):
    """A loss whose gradient is `slope` in float16, where 1e-8 is zero and 2**16 is infinite."""
    return lambda w: (jnp.sum((w * jnp.float32(slope)).astype(jnp.float16)).astype(jnp.float32), ())


@pytest.mark.parametrize("scale", [None, jnp.float32(2**12), automatic(2.0**12, 3)])
def test_a_loss_scale_leaves_the_gradient_as_it_is(scale) -> None:
    value, _, grad, _, _ = scaled_gradient(loss(0.5), jnp.float32(3.0), scale)
    assert (float(value), float(grad)) == (1.5, 0.5)


def test_a_loss_scale_keeps_what_float16_would_lose() -> None:
    def tiny(w):  # the cotangent passes through float16
        return jnp.sum((w.astype(jnp.float16) * 1).astype(jnp.float32) * 2.0**-26), ()

    lost = scaled_gradient(tiny, jnp.float32(1.0), None)[2]
    kept = scaled_gradient(tiny, jnp.float32(1.0), jnp.float32(2.0**12))[2]
    assert (float(lost), float(kept)) == (0.0, 2.0**-26)


class Line(nnx.Module):
    """Its loss is the sum of weight times batch, in float16."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.ones(()))

    def loss(self, ids, targets, *, deterministic) -> jax.Array:
        y = self.weight.get_value().astype(jnp.float16) * ids.astype(jnp.float16)
        return jnp.sum(y.astype(jnp.float32))


def test_an_automatic_scale_halves_on_overflow_and_doubles_after_good_steps() -> None:
    graphdef, params, rest = nnx.split(Line(), nnx.Param, ...)
    optimizer = optax.sgd(1.0)
    state = LoopState(params, rest, optimizer.init(params), automatic(2.0**4, 2))
    step = make_step(graphdef, optimizer)
    seen = []
    for slope in (1, 1, 1, 1, 60000, 1):
        ids = np.full((1, 1), slope, np.float32)
        state, _ = step(state, (ids, ids))
        seen.append((float(jax.tree.leaves(state.params)[0]), float(state.scale.scale)))
    # A step that overflows changes no weight; the third good one doubles the scale.
    assert seen == [(0, 16), (-1, 16), (-2, 32), (-3, 32), (-3, 16), (-4, 16)]


def test_state_of_each_method_is_counted(config_file: Path) -> None:
    wanted = methods.methods(str(config_file), [*UNIT], "optimizer.learning_rate=1e-3", 2.0**12, 5)
    # The runs that other benchmarks train as well.
    names = {method.config.name for method in wanted if method.own}
    assert names == {"tiny-float16", "tiny-plain-float16", "tiny-scalify-float16"}
    found = {}
    for method in wanted[2::3]:
        state = first_state(method.config, method.make(method.config), method.scale)[2]
        found[method.name] = methods.kept(state)
    # Of scalify one for each parameter and both of its moments.
    parameters = len(jax.tree.leaves(nnx.state(build(wanted[0].config), nnx.Param)))
    assert found == {"automatic loss scale": 2, "scalify": 3 * parameters}


def test_an_automatic_scale_reduces_each_gradient(config_file: Path) -> None:
    none, _, auto, *_ = methods.methods(
        str(config_file), [*UNIT], "optimizer.learning_rate=1e-3", 2.0**12, 5
    )
    costs = [methods.cost_of(method) for method in (none, auto)]
    rows = methods.compared([none, auto], costs).rows
    parameters = len(jax.tree.leaves(nnx.state(build(none.config), nnx.Param)))
    assert [row["reductions"] for row in rows] == [0, parameters]
    assert rows[0]["FLOPs"] == 0 < rows[1]["FLOPs"]
    assert [row["numbers kept"] for row in rows] == [0, 2]


def test_a_complete_run_is_read_again(make_config, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("policy=float16", "train.steps=2", "model.dropout=0.0")
    corpus = load_corpus(config.data)

    def go(data=corpus):
        return trained_with(config, build(config), automatic(2.0**8, 2), data, False, CONSOLE)

    run, scale = go()
    monkeypatch.setattr(_loss_scale, "make_step", lambda *_: pytest.fail("trained again"))
    again, same = go()
    assert again.loss == run.loss
    assert jax.tree.map(float, same) == jax.tree.map(float, scale)
    jax.tree.map(np.testing.assert_array_equal, again.params, run.params)

    another = dataclasses.replace(corpus, train_tokens=corpus.train_tokens[:-1])
    with pytest.raises(RecipeError, match="it is not what"):
        go(another)


@pytest.mark.slow
def test_command_compares_all_methods(tmp_path: Path, config_file: Path) -> None:
    path = tmp_path / "out.json"
    words = [*UNIT, "optimizer.name=sgd"]  # which compiles faster
    command = ["bench", "methods", *words, "--config", str(config_file), "--json", str(path)]
    assert main(command) == 0
    losses, costs = (table["rows"] for table in json.loads(path.read_text())["tables"])
    assert [row["method"] for row in losses[1:]] == [row["method"] for row in costs]
    assert losses[1]["lost at first"] > losses[2]["lost at first"]
    # Two steps of the same model; unit scaling begins with another.
    plain = [row for row in losses[1:] if row["method"] != "unit scaling"]
    assert all(abs(row["over float32"]) < 0.01 for row in plain)

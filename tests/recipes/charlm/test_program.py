"""Character models: every shape of them, and many runs in one program."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.charlm.program import Program, Runs, load_text, make_batches
from tests.gradients import jit

from .characters import make

MODELS = [
    *[(kind, "regular", "float16") for kind in ("conv", "gru", "lstm", "attention")],
    *[(kind, "unit", "fp8") for kind in ("conv", "gru", "lstm", "rhn", "attention")],
    ("gru", "unit", "float16"),
]


@pytest.mark.parametrize(("kind", "parametrization", "precision"), MODELS)
def test_every_model_has_a_float32_loss_and_float32_parameters(
    kind, parametrization, precision, tmp_path
) -> None:
    mixing = {"cell": kind, "kind": "rnn"} if kind in ("gru", "lstm", "rhn") else {"kind": kind}
    shape = {"parametrization": parametrization, "precision": precision, **mixing}
    norm = {"conv": "pre", "gru": "post"}.get(kind, "none")
    config = make(tmp_path, model={**shape, "norm": norm, "residual": "running_mean"})
    program = Program(config)
    state = jax.eval_shape(program.init, 0)
    text = jax.ShapeDtypeStruct((2, 7), jnp.int32)
    run = jax.value_and_grad(program.evaluate)
    loss, grads = jax.eval_shape(run, state.params, text)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}
    assert any("norm" in str(path) for path, _ in jax.tree_util.tree_leaves_with_path(grads)) == (
        norm != "none"
    )


@pytest.mark.parametrize("parametrization", ["regular", "unit"])
def test_a_model_sees_no_later_character(parametrization, tmp_path) -> None:
    for kind in ("conv", "rnn", "attention"):
        config = make(tmp_path, model={"kind": kind, "parametrization": parametrization})
        program = Program(config)
        text = np.arange(1, 8, dtype=np.int32)[None]
        changed = text.copy()
        changed[0, 4] = 200

        @jit
        def losses(*texts, program=program):
            params = program.init(0).params
            # The first three predictions have the same inputs and the same targets.
            return [program.evaluate(params, t) for x in texts for t in (x[:, :4], x)]

        first, whole, first_changed, whole_changed = losses(text, changed)
        assert first == first_changed
        assert whole != whole_changed


def test_parameters_of_a_unit_model_learn_at_rates_of_their_role(tmp_path) -> None:
    config = make(tmp_path, optimizer={"multipliers": {"readout": 3.0, "bias": 0.25}})
    program = Program(config)
    params = program.init(0).params
    # Adam's first update is 1 wherever there is a gradient, but for 1 - b2, rounded to float32.
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = program.rule.update(grads, program.rule.init(params), params)

    def largest(name: str) -> float:
        paths = jax.tree_util.tree_leaves_with_path(updates)
        (found,) = [x for path, x in paths if jax.tree_util.keystr(path).startswith(name)]
        return float(jnp.abs(found).max())

    width, branches = config.model.width, 2 * config.model.layers
    mlp = "['branches'][1]['branch']['up']"
    expected = {
        f"{mlp}['kernel']": 1 / math.sqrt(width * branches),
        f"{mlp}['bias']": 0.25 / math.sqrt(branches),
        "['readout']['kernel']": 3.0,
        "['embed']": 1 / math.sqrt(width),
    }
    assert {name: largest(name) for name in expected} == pytest.approx(expected, rel=1e-4)


def test_many_runs_in_one_program_are_those_runs(tmp_path) -> None:
    config = make(tmp_path)
    training, validation = make_batches(config, load_text(config))
    assert training.shape == (3, 2, 7)
    found = Runs(config, training, validation)([0.01, 0.1, 1e30], [0, 1, 0])
    program = Program(config)
    step, evaluate = jax.jit(program.step), jax.jit(program.evaluate)
    for (rate, seed), loss in zip([(0.01, 0), (0.1, 1)], found, strict=False):
        state = program.init(seed)
        for done, batch in enumerate(training):
            state, _ = step(state, batch, np.int32(done), np.float32(rate))
        assert float(evaluate(state.params, validation)) == pytest.approx(loss, rel=1e-5)
    assert found[2] == math.inf

"""Character models: every shape of them, and many runs in one program."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.charlm.program import Program, Runs, load_text, make_batches

from .characters import make

KINDS = ["conv", "gru", "lstm", "rhn", "attention"]
FORMATS = [("regular", "float16"), ("unit", "float16"), ("unit", "fp8")]


@pytest.mark.parametrize(("parametrization", "precision"), FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_model_has_a_float32_loss_and_float32_parameters(
    kind, parametrization, precision, tmp_path
) -> None:
    if (kind, parametrization) == ("rhn", "regular"):
        pytest.xfail("flax.nnx has no such cell; the config says so")
    for norm, residual in itertools.product(["pre", "post", "none"], ["running_mean"]):
        cell = {"cell": kind, "kind": "rnn"} if kind in ("gru", "lstm", "rhn") else {"kind": kind}
        shape = {"parametrization": parametrization, "precision": precision, **cell}
        config = make(tmp_path, model={**shape, "norm": norm, "residual": residual})
        program = Program(config)
        state = jax.eval_shape(program.init, 0)
        loss, grads = jax.eval_shape(
            jax.value_and_grad(program.evaluate),
            state.params,
            jax.ShapeDtypeStruct((2, 7), jnp.int32),
        )
        assert (loss.shape, loss.dtype) == ((), jnp.float32)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(grads)} == {"float32"}


def test_a_model_sees_no_later_character(tmp_path) -> None:
    for kind in ("conv", "rnn", "attention"):
        for parametrization in ("regular", "unit"):
            config = make(tmp_path, model={"kind": kind, "parametrization": parametrization})
            program = Program(config)
            params = program.init(0).params
            text = np.arange(1, 8, dtype=np.int32)[None]
            changed = text.copy()
            changed[0, 4] = 200
            # The loss of the first four predictions, whose inputs are the same.
            losses = [
                float(program.evaluate(params, jnp.asarray(t[:, :4]))) for t in (text, changed)
            ]
            whole = [float(program.evaluate(params, jnp.asarray(t))) for t in (text, changed)]
            assert losses[0] == losses[1]
            assert whole[0] != whole[1]


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

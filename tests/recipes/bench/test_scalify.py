"""`bench scalify`: judging runs, programs of wide range, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.bench import scalify
from recipes.bench._extremes import Program, error, programs
from recipes.bench._runs import Run
from recipes.cli import main


def test_losses_are_judged_against_the_plain_program(make_config) -> None:
    def run(loss: float) -> Run:
        return Run(make_config(), None, None, loss)

    runs = {"float32": run(2.0), "float16": run(2.008), "fp8": run(1.99)}
    rows = scalify.losses(run(2.0), runs).rows
    assert rows[2]["over plain float32"] == pytest.approx(0.004)
    assert [row.get("within") for row in rows] == [None, None, False, True]


def test_error_is_relative_and_the_worst_leaf_counts() -> None:
    expected = {"a": jnp.full(4, 1e20), "b": jnp.full(2, 1e-20)}
    found = {"a": jnp.full(4, 1.01e20), "b": jnp.full(2, 1.5e-20)}
    assert error(found, expected) == pytest.approx(0.5, rel=1e-5)
    assert np.isnan(error({"a": jnp.full(4, jnp.inf) - jnp.inf, "b": expected["b"]}, expected))


def test_every_program_is_beyond_plain_float16() -> None:
    for name, function, arguments in programs():
        half = jax.tree.map(lambda x: x.astype(jnp.float16), arguments)
        found = error(jax.jit(function)(*half), jax.jit(function)(*arguments))
        assert not found < 0.5, f"{name}: plain float16 is within {found:.0%}"


def test_extremes_reports_a_program_that_is_wrong() -> None:
    program = Program("halved", lambda x: x / 2, (jnp.ones(3),))
    (row,) = scalify.extremes([program]).rows
    assert row["within"]
    assert row["scalify float16"] == 0.0


@pytest.mark.slow
def test_command_prints_every_table(tmp_path: Path, config_file: Path) -> None:
    path = tmp_path / "out.json"
    words = ["model.dropout=0.0", "train.steps=2", "--rounds", "4", "--compilations", "1"]
    assert (
        main(["bench", "scalify", *words, "--config", str(config_file), "--json", str(path)]) == 0
    )
    losses, costs, extremes = (table["rows"] for table in json.loads(path.read_text())["tables"])
    assert len({row["validation loss"] for row in losses}) >= 3
    assert [row["what"] for row in costs] == ["step", "trace and compile"]
    assert all(row["within"] for row in extremes)

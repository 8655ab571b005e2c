"""`bench parity`: counting lost gradients, judging losses, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.bench import parity
from recipes.bench._underflow import Underflow, underflow
from recipes.cli import main

# In float16: kept, zero, subnormal, zero in float32 as well, infinite.
SLOPES = (1.0, 1e-9, 1e-6, 0.0, 1e6)


class Linear(nnx.Module):
    """A loss whose gradient is `SLOPES`, rounded to a dtype."""

    def __init__(self, dtype):
        self.readout = nnx.Param(jnp.ones(len(SLOPES)))
        self.dtype = dtype

    def loss(self, ids, targets, *, deterministic):
        slopes = jnp.asarray(np.array(SLOPES, np.float32)).astype(self.dtype)
        return jnp.sum(self.readout.get_value().astype(self.dtype) * slopes)


def test_underflow_counts_what_float16_loses():
    narrow, params, rest = nnx.split(Linear(jnp.float16), nnx.Param, ...)
    wide = nnx.graphdef(Linear(jnp.float32))
    batch = np.zeros((1, 3), np.int32)
    nothing = np.zeros(len(SLOPES), bool)
    counts = underflow(wide, narrow, params, rest, [batch, batch], nothing)
    assert counts == Underflow(entries=10, lost=2, subnormal=2, not_finite=2, lost_absent=0)
    assert counts.lost_share == counts.lost_occurring_share == 0.2
    assert underflow(wide, wide, params, rest, [batch], nothing).lost == 0


def test_underflow_sets_the_readout_of_absent_tokens_apart():
    narrow, params, rest = nnx.split(Linear(jnp.float16), nnx.Param, ...)
    wide = nnx.graphdef(Linear(jnp.float32))
    absent = np.arange(len(SLOPES)) == 1
    counts = underflow(wide, narrow, params, rest, [np.zeros((1, 3), np.int32)], absent)
    assert (counts.lost, counts.lost_absent, counts.lost_occurring_share) == (1, 1, 0.0)


def test_losses_are_judged_against_float32(make_config):
    def run(policy, loss, library="unitscale"):
        config = make_config(f"policy={policy}", f"model.library={library}")
        return parity.Run(config, None, None, loss)

    runs = {
        "float32": run("float32", 2.0),
        "float16": run("float16", 2.004),
        "fp8": run("fp8", 1.992),
        "plain": run("float16", 3.0, "plain"),
    }
    rows = parity.losses(runs).rows
    assert rows[1]["over float32"] == pytest.approx(0.002)
    assert [row.get("within") for row in rows] == [None, False, True, None]


@pytest.mark.parametrize(
    ("own", "other", "within"), [(1, 10, True), (1, 9, False), (0, 5, True), (0, 0, False)]
)
def test_gain_is_the_ratio_of_shares(own, other, within):
    ours, plain = ({"now": Underflow(100, lost, 0, 0, 0)} for lost in (own, other))
    row = parity.gradients(ours, plain).rows[0]
    assert row["within"] is within
    assert row["share lost"] == own / 100


@pytest.mark.slow
def test_command_compares_all_policies(tmp_path: Path, config_file: Path):
    path = tmp_path / "out.json"
    words = ["model.library=unitscale", "model.dropout=0.0", "train.steps=2"]
    command = ["bench", "parity", *words, "--config", str(config_file), "--json", str(path)]
    assert main(command) == 0
    losses, gradients = (table["rows"] for table in json.loads(path.read_text())["tables"])
    assert [row["policy"] for row in losses] == ["float32", "float16", "fp8", "float16"]
    assert abs(losses[1]["over float32"]) < 0.01
    # The same parameters and batches: a policy that had no effect would give the same loss.
    assert len({row["validation loss"] for row in losses}) == 4
    assert [row["when"] for row in gradients[::2]] == ["at initialisation", "at the end"]
    names = {folder.name for folder in (tmp_path / "runs").iterdir()}
    assert names == {"tiny-float32", "tiny-float16", "tiny-fp8", "tiny-plain-float16"}

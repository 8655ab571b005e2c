"""`bench overhead`: timing in turns, counting operations, and the command."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from recipes.bench import overhead
from recipes.bench._models import bert_large, flops
from recipes.bench._timing import interleaved, ratio
from recipes.bench._unfactored import unfactored
from recipes.cli import main
from unitscale import nn, ops, rules

VOCAB, WIDTH, BATCH, TIME = 32, 8, 2, 4


class Small(nnx.Module):
    """A table, a dense layer and a loss: every factor can be counted by hand."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nn.Embed(VOCAB, WIDTH, rngs=rngs)
        self.dense = nn.Dense(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def loss(self, ids: jax.Array, targets: jax.Array, *, deterministic: bool) -> jax.Array:
        return ops.softmax_cross_entropy(self.dense(self.embed(ids)), targets)


def test_factors_are_what_a_hand_count_gives():
    with_factors = flops(Small, BATCH, TIME)
    with unfactored():
        without = flops(Small, BATCH, TIME)
    tokens = BATCH * TIME
    products = tokens * VOCAB + tokens * WIDTH + WIDTH * VOCAB  # output, input and kernel gradient
    loss, table = tokens * VOCAB, VOCAB * WIDTH
    assert with_factors - without == products + loss + table


def test_unfactored_leaves_the_rules_as_they_were():
    before = dict(vars(rules))
    with unfactored():
        assert rules.dense(4, 16, 64) == rules.Factors(1.0, (1.0, 1.0, 1.0))
        assert rules.residual(0.5) == rules.ResidualFactors(branch=1.0, skip=1.0)
        assert rules.normalized_weights((3.0, 4.0)) == (1.0, 1.0)
        assert rules.logit_factor(64) == 1 / 64
        # An op of one's own, whose factors are simulated or found to be those of a rule.
        for function in (jnp.cumsum, jnp.tanh):
            op = ops.unit_scaled(function, [jnp.zeros(8)], seeds=2)
            assert op.factors == rules.Factors(1.0, (1.0,))
    assert dict(vars(rules)) == before


def test_interleaved_takes_turns_and_drops_the_warmup():
    calls = []

    def slow():
        calls.append("slow")
        time.sleep(0.02)

    first, second = interleaved(slow, lambda: calls.append("fast"), rounds=4, warmup=1)
    assert len(calls) == 10
    rounds = [set(calls[i : i + 2]) for i in range(0, 10, 2)]
    assert rounds == [{"slow", "fast"}] * 5
    assert {calls[i] for i in range(0, 10, 2)} == {"slow", "fast"}  # either goes first in turn
    assert len(first.elapsed) == len(second.cpu) == 4
    assert min(first.elapsed) >= 0.02
    assert sum(first.cpu) < sum(first.elapsed)  # it slept


def test_ratio_is_taken_within_rounds():
    # A machine twice as slow in the last two rounds; the first program always takes 1.5 times.
    first, second = [1.5, 1.5, 3.0, 3.0, 4.5], [1.0, 1.0, 2.0, 2.0, 3.0]
    assert ratio(first, second) == (1.5, 1.5, 1.5, 1.5)


def test_command_reports_time_and_operations(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("parity.yaml", "gpt2-small.yaml"):
        shutil.copy(config_file, tmp_path / name)
        text = config_file.read_text().replace("library: plain", "library: unitscale")
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(overhead, "CONFIGS", tmp_path)
    monkeypatch.setattr(
        overhead, "bert_large", lambda: bert_large(vocab=64, width=32, layers=1, heads=2)
    )
    path = tmp_path / "out.json"
    assert main(["bench", "overhead", "--rounds", "4", "--no-larger", "--json", str(path)]) == 0
    timed, counted = json.loads(path.read_text())["tables"]
    (row,) = timed["rows"]
    assert row["lower quartile"] <= row["ratio"] <= row["upper quartile"]
    assert row["within"] is (row["ratio"] <= 1.05)
    gpt, bert = counted["rows"]
    for row in (gpt, bert):
        assert row["with factors"] > row["without"] > 0
        assert row["added"] == pytest.approx(row["with factors"] / row["without"] - 1)
    assert gpt["over plain"] > 0

"""`bench transfer`: the best rate of a curve, runs that are found again, and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from recipes.bench import transfer
from recipes.cli import main
from recipes.registry import load_config
from recipes.text import ByteTokenizer, load_corpus
from recipes.errors import RecipeError
from recipes.run.evaluate import make_evaluation, mean_loss
from recipes.run.state import init_state
from recipes.train import make_train_step

INFINITE = math.inf
SMALL = (*transfer._shape(32), "train.steps=4", "train.eval_batches=2")


@pytest.mark.parametrize("best", [0.7, 1.0, 1.4])
def test_the_vertex_is_that_of_a_parabola_in_the_logarithm(best: float) -> None:
    losses = {rate: math.log2(rate / best) ** 2 + 3 for rate in (0.25, 0.5, 1.0, 2.0, 5.0)}
    assert transfer.vertex(losses) == pytest.approx(best)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({1.0: 1.0, 2.0: 2.0, 4.0: 3.0}, 1.0),
        ({1.0: 3.0, 2.0: 2.0, 4.0: INFINITE}, 2.0),
        ({1.0: 1.0, 2.0: 1.0, 4.0: 1.0}, 1.0),
    ],
    ids=["edge", "beside a divergence", "flat"],
)
def test_without_a_parabola_it_is_the_best_rate(losses: dict, expected: float) -> None:
    assert transfer.vertex(losses) == expected


def curve(best: float) -> dict[float, float]:
    return {2.0**k: (k - math.log2(best)) ** 2 + 2 for k in range(-6, 7)}


@pytest.mark.parametrize(("wide", "ok"), [(1.9, True), (2.1, False), (64.0, False)])
def test_widths_are_judged_by_how_far_their_rates_lie_apart(wide: float, ok: bool) -> None:
    losses = {"u-muP": {64: curve(1.0), 256: curve(wide)}, "plain": {64: curve(4), 256: curve(1)}}
    rows = transfer.best_rates(losses).rows
    assert [row.get("within") for row in rows] == [None, ok, None, None]
    assert rows[1]["apart"] == pytest.approx(wide)
    assert rows[3]["apart"] == pytest.approx(4)
    assert rows[3]["cost"] == pytest.approx((2 + 4) / 2 - 1)  # two octaves from the optimum


def test_the_rate_in_the_state_is_that_of_the_optimizer(config_file: Path) -> None:
    """One compiled step for every rate gives what a run of that rate gives."""
    words = [*SMALL, "optimizer.warmup_steps=1", "optimizer.learning_rate=0.003"]
    config = load_config(config_file, words)
    corpus = load_corpus(config.data, ByteTokenizer())
    path = config_file.with_name("rows.jsonl")
    found = transfer.measure(
        config, corpus, [0.03, 0.003, 1e30], transfer.Rows(path), Console(quiet=True)
    )
    graphdef, optimizer, state = init_state(config)
    step, batches = make_train_step(graphdef, optimizer), corpus.training(config.seed)
    for index in range(4):
        state, _ = step(state, next(batches), np.int32(index))
    evaluate = make_evaluation(graphdef)
    loss = mean_loss(evaluate, state.params, state.rest, corpus.validation(2))
    # The rate is multiplied after the schedule rather than before: one rounding more per step.
    assert found[0.003] == pytest.approx(loss, rel=1e-5)
    assert abs(found[0.03] - found[0.003]) > 0.01
    assert found[1e30] == INFINITE
    assert transfer.Rows(path).find(config, corpus, 1e30) == INFINITE  # a row like any other
    assert transfer.Rows(path).find(config, corpus, 1e-2) is None


def command(config_file: Path, *words: str) -> int:
    rates = [word for rate in (0.5, 1, 2) for word in ("--rate", str(rate))]
    plain = [word for rate in (0.001, 0.01, 0.1) for word in ("--plain-rate", str(rate))]
    sizes = ["--width", "32", "--config", str(config_file)]
    short = ["train.steps=2", "optimizer.warmup_steps=0", "model.dropout=0.0"]
    library = ["model.library=unitscale", "optimizer={umup: true, learning_rate: 1.0}"]
    return main(["bench", "transfer", *sizes, *rates, *plain, *library, *short, *words])


def test_command_draws_and_measures_nothing_twice(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    assert command(config_file, "--json", str(out)) == 0
    rows = json.loads(out.read_text("utf-8"))["tables"][0]["rows"]
    assert [(row["parametrization"], row["width"]) for row in rows] == [
        ("u-muP", 32),
        ("plain", 32),
    ]
    assert all(np.isfinite(row["loss"]) for row in rows)
    runs = tmp_path / "runs"
    assert (runs / "transfer.png").read_bytes().startswith(b"\x89PNG")
    lines = (runs / "transfer.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == 6
    monkeypatch.setattr(transfer, "_trainer", lambda *_: pytest.fail("trained again"))
    assert command(config_file, "--json", str(out)) == 0
    assert json.loads(out.read_text("utf-8"))["tables"][0]["rows"] == rows


def test_refusals(config_file: Path, tmp_path: Path) -> None:
    three = {"rate": [1.0, 2.0, 3.0], "plain_rate": [1.0, 2.0, 3.0]}
    with pytest.raises(RecipeError, match=r"--width: expected multiples of 32.*got \[50\]"):
        transfer.main(config=str(config_file), width=[50], **three)
    with pytest.raises(RecipeError, match="--rate: expected at least 3 different positive rates"):
        transfer.main(config=str(config_file), width=[32], **three | {"rate": [1.0, 1.0, 2.0]})
    with pytest.raises(RecipeError, match="--plain-rate: expected at least 3"):
        transfer.main(config=str(config_file), width=[32], **three | {"plain_rate": [1, 2, -3]})
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RecipeError, match=r"train\.runs_dir: cannot use .*File exists"):
        transfer.Rows(tmp_path / "file" / "rows.jsonl")

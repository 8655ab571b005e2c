"""`bench libraries`: every rate is trained, and each library judged at its best."""

import json
import re
from pathlib import Path

import pytest

from recipes.bench import _compare
from recipes.bench._compare import comparison, configs_of
from recipes.bench._runs import Told
from recipes.bench.libraries import PLAIN, UNIT
from recipes.cli import main
from recipes.config import RunConfig
from recipes.registry import CONFIGS, load_config


def test_a_variant_has_a_run_for_each_rate() -> None:
    entry = comparison("libraries").at_rates({PLAIN: [0.002, 0.004]})
    rates = {k: v.settings.get("optimizer.learning_rate") for k, v in entry.variants.items()}
    assert rates == {f"{PLAIN}-0.002": 0.002, PLAIN: 0.004, UNIT: None}
    assert entry.reference == PLAIN
    assert entry.label(f"{PLAIN}-0.002") == "plain flax.nnx, 0.002"
    assert comparison("libraries").at_rates({PLAIN: [0.3]}).reference == f"{PLAIN}-0.3"


def test_a_bert_is_compared_too() -> None:
    entry, path = comparison("libraries"), str(CONFIGS / "bert/books.yaml")
    entry = entry.model_copy(update={"recipe": "bert"})
    plain, unit = (configs_of(entry, Told(path, seeds=1), name)[0] for name in (PLAIN, UNIT))
    assert (plain.model.library, plain.optimizer.umup, plain.name) == (
        "plain",
        False,
        f"books-{PLAIN}",
    )
    assert unit == load_config(path, [f"name=books-{UNIT}"])


@pytest.mark.parametrize("rate_seeds", [None, 1])
def test_each_library_is_judged_at_its_best(
    rate_seeds: int | None, tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are given: of plain models best at 0.02, of unit scaling at 0.5, and lower."""
    trained = []

    def loss(config: RunConfig) -> float:
        plain = config.name.startswith("tiny-plain")
        best, least = (0.02, 2.0) if plain else (0.5, 1.9)
        seed = 0.01 * config.seed * (1 if plain else 1.1)
        return least + abs(config.optimizer.learning_rate - best) + seed

    monkeypatch.setattr(_compare, "trained", lambda config, fresh: trained.append(config) or {})
    monkeypatch.setattr(_compare, "loss_of", loss)
    out = tmp_path / "out.json"
    words = ["--config", str(config_file), "--json", str(out), "model.dropout=0"]
    words += ["--plain-rates", "0.04,0.01,0.02", "--unit-rates", "0.25,0.5", "--seeds", "3"]
    words += [] if rate_seeds is None else ["--rate-seeds", str(rate_seeds)]
    assert main(["bench", "libraries", *words]) == 0
    document = json.loads(out.read_text("utf-8"))
    every, best = (table["rows"] for table in document["tables"])
    assert re.fullmatch("[0-9a-f]{16}", document["tables"][0]["configs"])
    rates = [f"plain flax.nnx, {rate}" for rate in (0.01, 0.02, 0.04)]
    assert [row["variant"] for row in every] == [*rates, "unit scaling, 0.25", "unit scaling, 0.5"]
    assert [row["learning rate"] for row in best] == [0.02, 0.5]
    assert [row["variant"] for row in best] == ["plain flax.nnx", "unit scaling"]
    assert best[0]["validation loss"] == pytest.approx(2.01)
    assert best[1]["over reference"] == pytest.approx(-0.0493, abs=1e-3)
    assert best[1]["verdict"] == "within"
    assert document["tables"][1]["title"].endswith(": mean of 3 seeds")
    at_best = [c for c in trained if c.optimizer.learning_rate in (0.02, 0.5)]
    assert {config.seed for config in at_best} == {0, 1, 2}
    others = {config.seed for config in trained if config not in at_best}
    assert others == ({0, 1, 2} if rate_seeds is None else {0})

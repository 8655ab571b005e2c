"""The one rule by which runs are compared, its entries, and the command that prints them."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, strategies as st

from recipes.bench import _compare, _runs
from recipes.bench._compare import Compared, compare, comparison, configs_of, judged, verdict
from recipes.bench._runs import Told, digest_of
from recipes.cli import main
from recipes.config import RunConfig
from recipes.errors import RecipeError
from recipes.registry import CONFIGS, load_config
from recipes.train import Outcome
from tests.recipes.configs import FILES
from tests.recipes.idx import write_config as write_images

LISTED = yaml.safe_load(Path(_compare.__file__).with_name("losses.yaml").read_text("utf-8"))
NAMES = list(LISTED["comparisons"])
positive = st.floats(0.5, 2.0)


@pytest.mark.parametrize(
    ("distance", "error", "expected"),
    [
        (0.5, 0.0, "within"),
        (0.50001, 0.0, "outside"),
        (0.3, 0.1, "within"),
        (0.31, 0.1, "not resolved"),
        (0.69, 0.1, "not resolved"),
        (0.71, 0.1, "outside"),
        (math.nan, 0.0, "outside"),
        (math.inf, 0.0, "outside"),
        (math.inf, math.nan, "outside"),
    ],
)
def test_what_two_standard_errors_leave_open_is_not_resolved(
    distance: float, error: float, expected: str
) -> None:
    assert verdict(distance, error, 0.5) == expected


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=6), st.booleans())
def test_differences_are_paired_by_seed(pairs: list[tuple[float, float]], is_loss: bool) -> None:
    ours, theirs = np.array(pairs).T
    over = ours / theirs - 1 if is_loss else ours - theirs
    values = {"a": list(theirs), "b": list(ours)}
    reference, row = judged(values, "a", {"b": 0.1}, "loss" if is_loss else "f1")
    mean = "over reference" if is_loss else "above reference"
    error = "standard error" if is_loss else "standard error above"
    assert row[mean] == pytest.approx(over.mean(), abs=1e-12)
    assert row[error] == pytest.approx(over.std(ddof=1) / math.sqrt(len(over)), abs=1e-9)
    assert row["validation loss" if is_loss else "f1"] == pytest.approx(ours.mean())
    assert row["standard deviation"] == pytest.approx(ours.std(ddof=1), abs=1e-9)
    assert row["verdict"] == verdict(abs(row[mean]), row[error], 0.1)
    assert not {mean, error, "asked", "verdict"} & set(reference)


def test_bounds_count_in_both_directions() -> None:
    values = {"float32": [2.0], "near": [1.992], "low": [1.98], "high": [2.02], "free": [3.0]}
    bounds = {"near": 0.005, "low": 0.005, "high": 0.005}
    rows = {row["variant"]: row for row in judged(values, "float32", bounds)}
    verdicts = [row.get("verdict") for row in rows.values()]
    assert verdicts == [None, "within", "outside", "outside", None]
    assert rows["near"]["asked"] == "within 0.5%"
    assert "standard error" not in rows["near"]  # of one seed


def test_scores_are_judged_by_the_spread_of_seeds() -> None:
    values = {"float32": [80.0, 82.0, 84.0], "a": [79.0, 81.0, 83.0], "b": [77.0, 79.5, 82.0]}
    _, same, low = judged(values, "float32", dict.fromkeys("ab", "spread"), "f1")
    assert [(row["f1"], row["standard deviation"]) for row in (same, low)] == [(81, 2), (79.5, 2.5)]
    assert (same["verdict"], same["asked"]) == ("within", "within the seeds' 2")
    assert low["verdict"] == "outside"
    (_, alone) = judged({"x": [80.0], "a": [79.0]}, "x", {"a": "spread"}, "f1")
    assert "verdict" not in alone


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.5, 0.5], "within"), ([0.97, 1.02], "not resolved"), ([1.2, 1.21], "outside")],
)
def test_no_worse_is_asked_of_one_side(values: list[float], expected: str) -> None:
    (_, row) = judged({"x": [1.0, 1.0], "a": values}, "x", {"a": "no worse"})
    assert row["verdict"] == expected


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_is_a_valid_config(name: str, tmp_path: Path) -> None:
    entry = comparison(name)
    assert (CONFIGS / entry.config).is_file()
    assert entry.reference in entry.variants
    path = None
    if entry.recipe == "images":
        path = tmp_path / "images.yaml"
        path.write_text("recipe: images\nname: images\n", encoding="utf-8")
    told = Told(None if path is None else str(path), seeds=2)
    names = set()
    for variant in entry.variants:
        first, second = configs_of(entry, told, variant, FILES.get(entry.recipe, []))
        assert first.name.endswith(f"-{variant}")
        assert (second.name, second.seed) == (f"{first.name}-seed{first.seed + 1}", first.seed + 1)
        names |= {first.name, second.name}
    assert len(names) == 2 * len(entry.variants)


def test_a_digest_tells_runs_apart_but_not_where_they_lie() -> None:
    def digest(*words: str) -> str:
        return digest_of([load_config(CONFIGS / "gpt/parity.yaml", words)])

    here = digest("data.path=/a/plays.txt", "train.runs_dir=/a", "data.cache_dir=/a")
    assert here == digest("data.path=/b/plays.txt", "train.runs_dir=b")
    assert len({here, digest(), digest("data.path=/b/novels.txt"), digest("seed=1")}) == 4


def test_runs_of_one_name_are_the_same_run() -> None:
    """So that benchmarks share what they train."""
    seen: dict[str, RunConfig] = {}
    for name in NAMES:
        entry = comparison(name)
        for variant in entry.variants if entry.recipe in ("gpt", "bert") else ():
            for config in configs_of(entry, Told(), variant):
                assert seen.setdefault(config.name, config) == config
    assert len(seen) > 20


def test_options_choose_among_variants() -> None:
    entry = comparison("scalify").only("--formats", "fp8, float32", prefix="scalify-")
    assert list(entry.variants) == ["plain-float32", "scalify-fp8", "scalify-float32"]
    assert entry.at_rate(0.5) == {name: ["optimizer.learning_rate=0.5"] for name in entry.variants}
    assert entry.at_rate(None) == {name: [] for name in entry.variants}
    with pytest.raises(RecipeError, match=r"--formats: expected some of float16, .* got fp9"):
        comparison("scalify").only("--formats", "fp9", prefix="scalify-")


def test_overrides_are_told_to_every_run_and_own_words_win(config_file: Path) -> None:
    told = Told(str(config_file), ["train.steps=3", "seed=4"], data=["texts/elsewhere.txt"])
    entry = comparison("underflow")
    (config,) = configs_of(entry, told, "plain-float16", ["optimizer.learning_rate=0.5"])
    assert (config.seed, config.train.steps, config.policy) == (4, 3, "float16")
    assert config.optimizer.learning_rate == 0.5
    assert config.data.model_dump()["path"] == "texts/elsewhere.txt"
    assert config.name == "tiny-plain-float16-elsewhere"
    with pytest.raises(RecipeError, match="expected a config of recipe bert; got recipe gpt"):
        configs_of(comparison("lms"), told, "float32")


def test_runs_on_several_texts_are_named_after_them() -> None:
    told = Told(seeds=2, data=["a/plays.txt", "b/novels.txt"])
    runs = configs_of(comparison("parity"), told, "fp8")
    assert [(run.name, run.seed) for run in runs] == [
        ("parity-fp8-plays", 0),
        ("parity-fp8-plays-seed1", 1),
        ("parity-fp8-novels", 0),
        ("parity-fp8-novels-seed1", 1),
    ]
    assert [run.data.model_dump()["path"] for run in runs[1:3]] == ["a/plays.txt", "b/novels.txt"]
    with pytest.raises(RecipeError, match=r"files of different names; got a/x\.txt, b/x\.txt"):
        configs_of(comparison("parity"), told._replace(data=["a/x.txt", "b/x.txt"]), "fp8")


def test_texts_are_judged_each_and_together() -> None:
    entry = comparison("parity").only("--policies", "fp8")
    told = Told(seeds=2, data=["plays.txt", "novels.txt"])
    configs = {name: configs_of(entry, told, name) for name in entry.variants}
    values = {"float32": [1.0, 2.0, 4.0, 5.0], "fp8": [1.1, 2.0, 4.0, 5.5]}
    found = Compared(entry, configs, values, ["plays", "novels"]).tables()
    titles = ["mean of 2 seeds, plays", "mean of 2 seeds, novels", "mean of 2 seeds, plays and nov"]
    assert all(words in table.title for words, table in zip(titles, found, strict=True))
    over = [table.rows[1]["over reference"] for table in found]
    assert over == pytest.approx([0.05, 0.05, 0.05])
    error = np.std([0.1, 0, 0, 0.1], ddof=1) / 2
    assert found[2].rows[1]["standard error"] == pytest.approx(error)
    alone = {name: found[:2] for name, found in values.items()}
    (table,) = Compared(entry, configs, alone, [""]).tables()
    assert table.title.endswith("mean of 2 seeds")


@pytest.fixture
def given_runs(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Runs that are trained in name only; their scores follow from format and seed."""
    seen: list[RunConfig] = []

    def train(config: RunConfig, **options: Any) -> Outcome:
        seen.append(config)
        formats = config.scalify
        penalty = 0 if formats is None else 0.25 if formats.products else 0.125
        signal = 15 if config.seed == 9 else None
        return Outcome(Path("nowhere"), 1, 2.0, {"accuracy": 1 - penalty - config.seed / 8}, signal)

    monkeypatch.setattr(_runs, "train", train)
    return seen


def test_a_score_is_that_of_the_run(
    tmp_path: Path, given_runs: list[RunConfig], capsys: pytest.CaptureFixture
) -> None:
    path, out = tmp_path / "tiny.yaml", tmp_path / "table.json"
    tree = yaml.safe_load(write_images(tmp_path).read_text("utf-8"))
    tree = {"recipe": "images", "name": "tiny", "data": tree["data"]}
    path.write_text(yaml.safe_dump(tree), encoding="utf-8")
    words = ["--seeds", "2", "train.steps=7", "--json", str(out)]
    assert main(["bench", "mnist", str(path), *words]) == 0
    (table,) = json.loads(out.read_text("utf-8"))["tables"]
    assert "7 steps, mean of 2 seeds" in table["title"]
    formats = ["plain", "float32", "bfloat16", "float16", "fp8"]
    assert [row["variant"] for row in table["rows"]] == formats
    accuracy = [1 - 0.0625 - penalty for penalty in (0, 0.125, 0.125, 0.125, 0.25)]
    assert [row["accuracy"] for row in table["rows"]] == accuracy
    assert table["rows"][-1]["above reference"] == -0.25
    assert len({config.name for config in given_runs}) == len(given_runs) == 10
    assert "0.9375" in capsys.readouterr().out
    assert main(["bench", "mnist", str(path), "seed=9"]) == 128 + 15
    assert "stopped by signal 15; run the same command to resume" in capsys.readouterr().err


def test_formats_are_compared_at_the_best_rate(
    tmp_path: Path, given_runs: list[RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = _runs.train

    def train(config: RunConfig, **options: Any) -> Outcome:
        found = trained(config, **options)
        lost = abs(config.optimizer.learning_rate - 0.1)
        return found._replace(scores={"accuracy": found.scores["accuracy"] - lost})

    monkeypatch.setattr(_runs, "train", train)
    path, out = write_images(tmp_path), tmp_path / "table.json"
    words = ["--rates", "0.2,0.05,0.1", "--seeds", "1", "train.steps=7", "--json", str(out)]
    assert main(["bench", "mnist", str(path), *words]) == 0
    rates, formats = json.loads(out.read_text("utf-8"))["tables"]
    assert [row["variant"] for row in rates["rows"]] == ["plain, 0.05", "plain, 0.1", "plain, 0.2"]
    assert {config.optimizer.learning_rate for config in given_runs[3:]} == {0.1}
    assert formats["rows"][-1]["above reference"] == -0.25


@pytest.mark.slow
def test_compare_trains_once_and_measures_all_validation_text(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = comparison("methods").only("--methods", "auto-loss-scale")
    told = Told(str(config_file), ["train.steps=2", "train.eval_batches=1", "model.dropout=0.0"])
    found = compare(entry, told)
    losses = [row["validation loss"] for row in found.table().rows]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)  # two steps, the second run in float16
    from_run = load_config(config_file, ["name=tiny-auto-loss-scale"])
    trained = Path(from_run.train.runs_dir, from_run.name, "config.yaml").read_text("utf-8")
    assert "policy: float16" in trained
    monkeypatch.setattr(_runs, "train", lambda config, **_: Outcome(Path(), 2, None, {}, None))
    assert compare(entry, told).values == found.values  # read from the checkpoint
    others = compare(entry, told._replace(jobs=2)).values
    for name, values in found.values.items():  # in processes of one core, which sum otherwise
        assert others[name] == pytest.approx(values, rel=1e-5)


def test_runs_side_by_side_keep_their_places_and_go_on_past_one_that_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given_runs: list[RunConfig],
    capsys: pytest.CaptureFixture,
) -> None:
    def each(tasks: Any, jobs: int, work: Any) -> Any:
        assert jobs == 3
        for task in reversed(tasks):  # whichever is over first
            yield task, work(*task)

    monkeypatch.setattr(_compare, "each", each)
    entry = comparison("mnist").of(["float32", "fp8"])
    path = tmp_path / "tiny.yaml"
    tree = yaml.safe_load(write_images(tmp_path).read_text("utf-8"))
    path.write_text(yaml.safe_dump({"recipe": "images", "name": "tiny", "data": tree["data"]}))
    told = Told(str(path), seeds=2)
    alone = compare(entry, told)
    assert compare(entry, told._replace(jobs=3)).values == alone.values
    assert "4/4  " in capsys.readouterr().out
    count = len(given_runs)
    with pytest.raises(
        RecipeError, match=r"2 of 4 runs failed: .*-fp8-seed9: .*signal 15.*run the"
    ):
        compare(entry, told._replace(jobs=3, overrides=["seed=8"]))
    assert len(given_runs) == count + 4

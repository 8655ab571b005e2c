"""Every benchmark runs as a command, with tiny models; results are compared and written."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from recipes.bench import parallel, parity, runs, step
from recipes.bench.runs import Told, compare, differences, verdict
from recipes.cli import main
from recipes.errors import RecipeError
from tests.recipes.conftest import TEXT
from tests.recipes.pretrained import FIXTURES
from tests.recipes.support import TASK_FILES, write_bert, write_tasks

UNIT = ("model.library=unitscale", "model.dropout=0.0", "train.steps=2", "optimizer.name=sgd")
TINY = ("model.width=16", "model.heads=2", "model.layers=1", "model.vocab=256")
TINY += ("data.tokenizer={kind: byte, vocab: null}", "data.sequence_length=16", "data.batch_size=2")
Rows = list[dict[str, Any]]


@pytest.fixture
def bench(tmp_path: Path, config_file: Path) -> Callable[..., list[Rows]]:
    """Run a benchmark, on the tiny config if it takes one; return the rows of its tables."""

    def run(name: str, *words: str) -> list[Rows]:
        out = tmp_path / "out.json"
        config = () if name in ("step", "fuzz", "h200") else ("--config", config_file)
        # What is given later counts.
        assert main(["bench", name, *map(str, config), *words, "--json", str(out)]) == 0
        return [table["rows"] for table in json.loads(out.read_text("utf-8"))["tables"]]

    return run


@pytest.mark.slow
def test_parity(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, gradients = bench("parity", *UNIT, "--seeds", "2")
    assert [row["variant"] for row in losses] == ["float32", "float16", "fp8"]
    assert abs(losses[1]["over reference"]) < 0.01
    # The same parameters and batches: a policy that had no effect would give the same loss.
    assert len({tuple(row["values"]) for row in losses}) == 3
    assert gradients[0]["lost"] < gradients[1]["lost"]
    narrow = ("gradients-bfloat16", "gradients-fp8")
    (losses,) = bench("parity", *UNIT, "--policies", ",".join(narrow), "--no-gradients")
    assert [row["variant"] for row in losses] == ["float32", *narrow]
    # In two steps, rounding to bfloat16 may be lost in the rounding of the loss to float32.
    assert losses[0]["loss"] != losses[2]["loss"]
    assert all(abs(row["over reference"]) < 0.002 and "verdict" in row for row in losses[1:])
    some = ("nothing", "cotangents", "cotangents in E5M2", "all")
    monkeypatch.setattr(parity, "ROUNDED", {name: parity.ROUNDED[name] for name in some})
    (rows,) = bench("parity", *UNIT, "--rounding")
    errors = [row["gradient error"] for row in rows]
    assert errors[0] == 0
    assert errors == sorted(set(errors))


@pytest.mark.slow
def test_libraries(bench: Any) -> None:
    words = ("--plain-rates", "0.01,0.1", "--methods", "--seeds", "1")
    losses, rates = bench("libraries", *UNIT, *words)
    assert len(losses) == 8
    by_rate = [row["loss"] for row in rates if row["variant"] == "plain-float32"]
    assert losses[0]["loss"] == min(by_rate) < max(by_rate)


@pytest.mark.slow
def test_scalify(bench: Any) -> None:
    words = ("model.dropout=0.0", "train.steps=8", "--rounds", "4")
    losses, cost, compiling = bench("scalify", *words)
    assert len({row["loss"] for row in losses}) == 3
    assert all(abs(row["over reference"]) < 0.02 for row in losses[1:])
    assert cost[0]["lower quartile"] <= cost[0]["ratio"] <= cost[0]["upper quartile"]
    assert [row["storage"] for row in compiling] == ["float32", "float16"]


@pytest.mark.slow
def test_compile_times(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "COMPILED", (("fp8", 8), ("fp8-scaled", 1)))
    (rows,) = bench("step", *TINY[:2], "--compile")
    assert [(row["program"], row["layers"]) for row in rows] == [("fp8", 8), ("fp8-scaled", 1)]
    assert all(row["ratio"] == row["s"] / row["plain s"] for row in rows)


@pytest.mark.slow
def test_optim(bench: Any, config_file: Path) -> None:
    text = config_file.read_text("utf-8").replace("library: plain", "library: unitscale")
    config_file.write_text(text, encoding="utf-8")
    size, times, losses = bench("optim", *UNIT[:3], "--rounds", "2")
    assert size[0]["together"] == pytest.approx(12, abs=0.1)
    assert [row["buffers"] for row in times] == ["new", "donated"]
    found = [row["loss"] for row in losses]
    assert max(found) / min(found) < 1.05


@pytest.mark.slow
def test_parallel(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "SHAPE", (64, 32))
    monkeypatch.setattr(parallel, "MESHES", ({"data": 8}, {"fsdp": 8}))
    monkeypatch.setattr(parallel, "h200_available", lambda: False)
    words = ("train.steps=20", "model.dropout=0.0", "data.batch_size=8", UNIT[0])
    mean, meshes, losses = bench("parallel", "--train", "--steps", *words)
    ratios = [row["over float32"] for row in mean]
    assert ratios == pytest.approx([1, 0.5, 0.25, 0.25], abs=0.01)
    assert meshes[0]["arguments MiB"] > meshes[1]["arguments MiB"]
    assert losses[0]["loss"] != losses[1]["loss"] == pytest.approx(losses[0]["loss"], rel=0.02)


@pytest.mark.slow
def test_lms(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and scores are made up, by format and seed, instead of trained."""
    score, seen = {"float32": 0.8, "float16": 0.79, "fp8": 0.5}, []

    def trained(config: Any, fresh: bool) -> dict[str, float]:
        seen.append(config)
        value = score[config.precision.policy] + 0.02 * config.seed
        return {"accuracy": value, "f1": 100 * value}

    monkeypatch.setattr(runs, "trained", trained)
    monkeypatch.setattr(runs, "loss_of", lambda config: 2 / score[config.precision.policy])
    write_tasks(tmp_path, tmp_path)
    questions, rows = (str(tmp_path / name) for name in TASK_FILES.values())
    words = ["--config", str(write_bert(tmp_path)), "--sst2", rows, rows, "--seeds", "2"]
    loss, sst2 = bench("lms", *words)
    assert [row.get("verdict") for row in loss] == [None, "outside", "outside"]
    assert [row["accuracy"] - 0.01 for row in sst2] == pytest.approx([*score.values()])
    for config in seen[6:]:  # each from the model of its own format and seed
        own = f"tiny-bert-{config.precision.policy}" + ("-seed1" if config.seed else "")
        assert config.init == str(tmp_path / "runs" / own)
    (article,) = json.loads(Path(questions).read_text("utf-8"))["data"]
    parts = [{"title": "one", "paragraphs": [part]} for part in article["paragraphs"]]
    Path(questions).write_text(json.dumps({"data": parts}), "utf-8")
    *_, squads = bench("lms", *words[:2], "--squad", questions, "--seeds", "1")
    assert [row["f1"] for row in squads] == pytest.approx([80, 79, 50])
    split = tmp_path / "runs" / "tiny-bert-squad"  # of twelve articles one is for validation
    texts = [(split / f"{name}.json").read_text() for name in ("train", "validation")]
    assert [len(json.loads(text)["data"]) for text in texts] == [11, 1]
    monkeypatch.undo()
    (tmp_path / "text.txt").write_text(TEXT, "utf-8")
    words = ["--lora", str(FIXTURES / "llama3"), "--data", str(tmp_path / "text.txt")]
    words += [
        "train.steps=1",
        "optimizer.warmup_steps=0",
        "data.sequence_length=8",
        f"train.runs_dir={tmp_path / 'runs'}",
    ]
    ((wide, narrow),) = bench("lms", "--no-runs", *words)
    assert 0 < abs(narrow["over reference"]) < 0.05
    assert wide["loss"] < 10


@pytest.mark.slow
def test_step(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    words = ("--shapes", "gpt2-small", "--rows", "plain-bfloat16,fp8", "--rounds", "2")
    ((plain, fp8),) = bench("step", *words, *TINY, "data.path=null")
    for row in (plain, fp8):
        assert 0 < row["loss"] < 10
        assert row["tokens/s"] == pytest.approx(1e3 * 2 * 16 / row["ms"])
        assert row["peak MiB"] > 0 < row["kernels"]
    assert fp8["over first"] == pytest.approx(fp8["ms"] / plain["ms"])
    assert main(["bench", "step", "--rows", "fp8", "model.width=7"]) == 2
    assert "width 7" in capsys.readouterr().err


def test_rows_and_shapes_are_valid() -> None:
    for shape in step.SHAPES:
        configs = [step.config_of(shape, row) for row in (step.ROWS | step.MORE)]
        assert len({(c.model.width, c.data.step_size) for c in configs}) == 1


def test_bad_input(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setattr("recipes.bench.aot.h200_available", lambda: False)
    for words, said in {
        "step --on tpu": "--on",
        "h200 --rows fp7": "--rows",
        "h200 --shapes fp7": "--shapes",
        "h200": f'pip install "jax-cuda13-plugin=={jax.__version__}"',
        "libraries --plain-rates a,b": "--plain-rates",
        "libraries --unit-rates 0.1,-1": "--unit-rates",
        f"lms --no-runs --charlm {tmp_path}": "--charlm",
    }.items():
        assert main(["bench", *words.split()]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.h200
@pytest.mark.slow
def test_h200(bench: Any, tmp_path: Path) -> None:
    words = ("--shapes", "llama-1b", "--rows", "plain-bfloat16,fp8", "--top", "2")
    small = ("model.width=64", "model.heads=4", *TINY[2:5], "data.sequence_length=64")
    (plain, fp8), places = bench("h200", *words, "--dump", str(tmp_path / "hlo"), *small)
    assert plain["FP8 matmuls"].startswith("0 of ")
    assert int(fp8["FP8 matmuls"].split()[0]) > 0 == fp8["amax"]
    assert plain["attention ms"] > 0
    assert fp8["over plain"] == pytest.approx(fp8["projected ms"] / plain["projected ms"])
    assert len(places) == len(list((tmp_path / "hlo").iterdir())) == 2


@pytest.mark.slow
def test_fuzz(bench: Any) -> None:
    (rows,) = bench("fuzz", "--programs", "4")
    assert sum(row["agree"] + row["left out"] for row in rows) == 4
    assert all(row["within"] for row in rows)


OURS = ("precision.policy=fp8", "model.library=unitscale")
VARIANTS = {"plain-float32": runs.plain_words(), "fp8": OURS}


def test_differences_are_paired_and_bounds_two_sided_but_for_no_worse() -> None:
    cases = [(0.5, 0), (0.3, 0.1), (0.31, 0.1), (0.69, 0.1), (0.71, 0.1), (0.51, 0), (math.nan, 0)]
    found = [verdict(distance, error, 0.5) for distance, error in cases]
    assert found == ["within"] * 2 + ["not resolved"] * 2 + ["outside"] * 3
    ours, theirs = np.array([[1.9, 2.3, 1.2], [2.0, 2.0, 1.0]])
    for metric, over, mean, error in (
        ("loss", ours / theirs - 1, "over reference", "standard error"),
        ("f1", ours - theirs, "above reference", "error above"),
    ):
        _, row = differences({"a": list(theirs), "b": list(ours)}, {"b": 0.1}, metric)
        assert row[mean] == pytest.approx(over.mean())
        assert row[error] == pytest.approx(over.std(ddof=1) / math.sqrt(3))
        assert row["verdict"] == verdict(abs(row[mean]), row[error], 0.1)
    values = {"float32": [2.0], "near": [1.992], "low": [1.98], "high": [2.02], "better": [1.0]}
    bounds = {"near": 0.005, "low": 0.005, "high": 0.005, "better": 0.0}
    found = [row.get("verdict") for row in differences(values, bounds)]
    assert found == [None, "within", "outside", "outside", "within"]


def test_every_text_and_seed_is_trained_once(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training is replaced by a formula for the loss; a run in float32 fails at last."""
    seen: list[Any] = []

    def loss_of(config: Any) -> float:
        best = 0.004 if config.model.library == "plain" else 1.0
        distance = abs(math.log2(config.optimizer.learning_rate / best))
        return 2.0 + 0.1 * config.seed + 0.01 * distance + len(config.data.path) * 1e-3

    monkeypatch.setattr(runs, "trained", lambda config, fresh: seen.append(config) or {"f1": 7.0})
    monkeypatch.setattr(runs, "loss_of", loss_of)
    texts = [str(tmp_path / name) for name in ("a.txt", "long.txt")]
    told = Told(str(config_file), ["model.dropout=0.0"], 2, False, texts)
    found = compare(VARIANTS, told, rates={"plain-float32": (0.001, 0.004), "fp8": (0.5,)})
    names = [f"tiny-fp8-0.5-{text}" + seed for text in ("a", "long") for seed in ("", "-seed1")]
    assert [config.name for config in seen[-4:]] == names
    assert len(seen) == 8 + 4
    plain = found.configs["plain-float32"]
    assert [config.optimizer.learning_rate for config in plain] == [0.004] * 4  # its best
    a, long, both, at_rates = found.tables("Loss", {"fp8": 0.1})
    assert both.rows[1]["values"] == [*a.rows[1]["values"], *long.rows[1]["values"]]
    assert [row["rate"] for row in at_rates.rows] == [0.001, 0.004, 0.5]

    def failing(config: Any, fresh: bool) -> Any:
        return {} if config.precision.policy == "fp8" else 1 / 0

    monkeypatch.setattr(runs, "trained", failing)
    with pytest.raises(RecipeError, match=r"1 of 2 runs failed: tiny-plain-float32: .*division"):
        compare(VARIANTS, Told(str(config_file)))
    with pytest.raises(RecipeError, match="--data"):
        compare(VARIANTS, Told(str(config_file), data=["a/x.txt", "b/x.txt"]))

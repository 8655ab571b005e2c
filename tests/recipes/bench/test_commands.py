"""Every benchmark as a command, on runs of two steps."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from recipes.bench import formats, overhead, parallel
from recipes.bench._compare import comparison, configs_of
from recipes.bench._runs import Told
from recipes.cli import main
from recipes.gpt.config import GPTConfig
from recipes.gpt.task import build
from tests.products import conversions

UNIT = ("model.library=unitscale", "model.dropout=0.0", "train.steps=2", "optimizer.name=sgd")
pytestmark = pytest.mark.slow


@pytest.fixture
def bench(tmp_path: Path, config_file: Path) -> Any:
    """Runs a benchmark of the tiny run; its tables."""

    def run(name: str, *words: str) -> list[list[dict[str, Any]]]:
        out = tmp_path / "out.json"
        command = ["bench", name, *words, "--config", str(config_file), "--json", str(out)]
        assert main(command) == 0
        return [table["rows"] for table in json.loads(out.read_text("utf-8"))["tables"]]

    return run


def test_parity(bench: Any, tmp_path: Path) -> None:
    losses, gradients = bench("parity", *UNIT, "--seeds", "2")
    assert [row["variant"] for row in losses] == ["float32", "float16", "fp8"]
    assert abs(losses[1]["over reference"]) < 0.01
    assert losses[1]["standard error"] > 0
    # The same parameters and batches: a policy that had no effect would give the same loss.
    assert len({row["validation loss"] for row in losses}) == 3
    assert [row["when"] for row in gradients[::2]] == ["at first", "at the end"]
    names = {folder.name for folder in (tmp_path / "runs").iterdir()}
    first = {"tiny-float32", "tiny-float16", "tiny-fp8"}
    assert names == first | {f"{name}-seed1" for name in first} | {"tiny-plain-float16"}


def test_formats(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    some = ("none", "cotangents", "cotangents in E5M2", "query", "all")
    monkeypatch.setattr(formats, "VARIANTS", {name: formats.VARIANTS[name] for name in some})
    (rows,) = bench("formats", *UNIT, "--batches", "1")
    assert [row["in FP8"] for row in rows] == list(some)
    errors = {row["in FP8"]: row["gradient error"] for row in rows}
    assert 0 < errors["none"] < errors["cotangents"] < errors["cotangents in E5M2"] < errors["all"]
    assert errors["query"] < errors["all"]


def test_methods(bench: Any) -> None:
    losses, costs = bench("methods", *UNIT)
    assert [row["variant"] for row in losses[1:]] == [row["method"] for row in costs]
    assert losses[1]["lost at first"] > losses[2]["lost at first"]
    # Two steps of the same model; unit scaling begins with another.
    plain = [row for row in losses[1:] if row["variant"] != "unit scaling"]
    assert all(abs(row["over reference"]) < 0.01 for row in plain)


def test_quant(bench: Any) -> None:
    words = ["--policies", "fp8,fp8_delayed", "--no-compile", "--seeds", "1"]
    policies, converted, *_ = bench("quant", *UNIT, *words)
    assert len({row["validation loss"] for row in policies}) == 3
    names = ["float32", "converted to fp8_dynamic", "converted to fp8_delayed"]
    assert [row["variant"] for row in converted[:3]] == names
    # Scales are powers of two: however they are chosen, so few steps may round alike.
    reference, *others = (row["validation loss"] for row in converted)
    assert reference not in others


# qwix 0.1.8 calls what Flax has deprecated.
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_qwix_takes_the_products_that_are_converted(config_file: Path) -> None:
    ids = jnp.zeros((1, 16), jnp.int32)
    counts = []
    for name in ("converted-fp8_dynamic", "qwix"):
        (config, *_) = configs_of(comparison("converted"), Told(str(config_file)), name)
        assert isinstance(config, GPTConfig)
        program = jax.make_jaxpr(build(config))(ids)
        counts.append(len(conversions(program, "float8_e4m3fn")))
    # Both operands of query, key, value, out, up and down.
    assert counts == [12, 12]


def test_scalify(bench: Any) -> None:
    # Losses are of float16: after some steps alone FP8's is another number.
    words = ["model.dropout=0.0", "train.steps=8", "--rounds", "4", "--compilations", "1"]
    losses, costs, counts, extremes = bench("scalify", *words)
    assert len({row["validation loss"] for row in losses}) >= 3
    what = ["step", "trace and compile", "... scalify in float16"]
    assert [row["what"] for row in costs] == what
    assert [row["program"] for row in counts] == ["plain", "scalify float32", "scalify float16"]
    assert counts[1]["within"]
    assert all(row["within"] for row in extremes)


def test_optim(bench: Any, config_file: Path) -> None:
    text = config_file.read_text("utf-8").replace("library: plain", "library: unitscale")
    config_file.write_text(text, encoding="utf-8")
    size, times, losses = bench("optim", *UNIT[:3], "--large", str(config_file), "--rounds", "4")
    assert [row["formats"] for row in size] == [row["variant"] for row in losses]
    assert [row["buffers"] for row in times] == ["new", "donated"]
    found = [row["validation loss"] for row in losses]
    assert max(found) / min(found) < 1.05


def test_trace(bench: Any) -> None:
    words = ["model.dropout=0.0", "optimizer.name=sgd", "--rounds", "4"]
    ((time, memory, compilation),) = bench("trace", *words)
    assert time["lower quartile"] <= time["ratio"] <= time["upper quartile"]
    assert time["within"] is (time["ratio"] <= 3)
    # The step's arguments and results are in both programs, its statistics in one of them.
    assert 1 < memory["ratio"] == pytest.approx(memory["traced"] / memory["plain"])
    assert compilation["traced"] > compilation["plain"] > 0


def test_parallel(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "SHAPE", (64, 32))
    _, rows = bench("parallel", "--train", "train.steps=20", "model.dropout=0.0")
    losses = [row["validation loss"] for row in rows]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_scales(tmp_path: Path, text_file: Path) -> None:
    out, figure = tmp_path / "out.json", tmp_path / "rms.svg"
    words = ["--depths", "1,2", "--widths", "32,64", "--batch", "1", "--length", "8"]
    words += ["--figure", str(figure)]
    assert main(["bench", "scales", *words, "--data", str(text_file), "--json", str(out)]) == 0
    summary, by_shape, _ = (table["rows"] for table in json.loads(out.read_text())["tables"])
    shapes = [row["layers x width"] for row in by_shape]
    assert shapes == ["1 x 64 random", "2 x 64 random", "1 x 32 random", "2 x 32 random"] + [
        "1 x 64 text"
    ]
    assert all(row["least"] <= row["greatest"] for row in summary)
    drawing = figure.read_text(encoding="utf-8")
    for label in ("plain flax.nnx", "unitscale", "range of E4M3", "outputs of layers"):
        assert f"<!-- {label} -->" in drawing


def test_overhead(tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = config_file.read_text().replace("library: plain", "library: unitscale")
    for folder, name in [("gpt", "parity"), ("gpt", "gpt2-small")]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{name}.yaml").write_text(text)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "large.yaml").write_text(
        "recipe: bert\nname: small\nmodel: {vocab: null, width: 32, layers: 1, heads: 2}\n"
    )
    monkeypatch.setattr(overhead, "CONFIGS", tmp_path)
    monkeypatch.setattr(overhead, "DEEP", ("model.layers=3",))
    longer = ("policy=float32", "model.dropout=0.0", "data.sequence_length=512")
    monkeypatch.setattr(overhead, "LONG", longer)
    out = tmp_path / "out.json"
    assert main(["bench", "overhead", "--rounds", "4", "--no-larger", "--json", str(out)]) == 0
    (row,), (flat,), (gpt, bert), (deep,), (memory, seconds) = (
        table["rows"] for table in json.loads(out.read_text())["tables"]
    )
    assert row["lower quartile"] <= row["ratio"] <= row["upper quartile"]
    assert row["within"] is (row["ratio"] <= 1.05)
    assert flat["within"] is (flat["ratio"] <= 1.0)
    for row in (gpt, bert):
        assert row["with factors"] > row["without"] > 0
        assert row["added"] == pytest.approx(row["with factors"] / row["without"] - 1)
    assert gpt["over plain"] > 0
    assert deep["ratio"] == pytest.approx(deep["scan, s"] / deep["one by one, s"])
    assert memory["ratio"] < 1
    assert seconds["within"] is (seconds["ratio"] <= 1.3)

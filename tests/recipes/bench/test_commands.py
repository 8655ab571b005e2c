"""Every benchmark runs as a command, with tiny models."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes.bench import fuzz, lms, parallel, parity, runs, step
from recipes.cli import main
from recipes.finetune.config import FinetuneConfig
from recipes.sweep.points import Curve
from tests.recipes.masked import write_bert
from tests.recipes.tasks import FILES, write_tasks
from unitscale import ScaledArray

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
    assert losses[1]["standard error"] > 0
    # The same parameters and batches: a policy that had no effect would give the same loss.
    assert len({row["loss"] for row in losses}) == 3
    assert [row["when"] for row in gradients[::2]] == ["at first", "at the end"]
    assert gradients[0]["lost"] < gradients[1]["lost"]
    some = ("nothing", "cotangents", "cotangents in E5M2", "query", "all")
    monkeypatch.setattr(parity, "ROUNDED", {name: parity.ROUNDED[name] for name in some})
    (rows,) = bench("parity", *UNIT, "--rounding")
    assert [row["variant"] for row in rows] == ["float32", *some]
    exact, nothing, e4m3, e5m2, query, everything = (row["gradient error"] for row in rows)
    assert exact == 0 < nothing < e4m3 < e5m2 < everything
    assert query < everything


@pytest.mark.slow
def test_libraries(bench: Any) -> None:
    words = ("--plain-rates", "0.01,0.1", "--methods", "--seeds", "1")
    losses, rates = bench("libraries", *UNIT, *words)
    assert [row["variant"] for row in losses][:3] == ["plain-float32", "float32", "plain-float16"]
    assert len(losses) == 8
    by_rate = {row["rate"]: row["loss"] for row in rates if row["variant"] == "plain-float32"}
    assert losses[0]["loss"] == min(by_rate.values()) < max(by_rate.values())


@pytest.mark.slow
def test_scalify(bench: Any) -> None:
    losses, cost, compiling = bench(
        "scalify", "model.dropout=0.0", "train.steps=8", "--rounds", "4"
    )
    names = ["plain-float32", "scalify-float16", "scalify-fp8"]
    assert [row["variant"] for row in losses] == names
    assert len({row["loss"] for row in losses}) == 3
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
    assert [row["formats"] for row in size] == [row["variant"] for row in losses]
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
    assert mean[2]["heavy-tailed nearest"] < 0.04
    assert [row["mesh"] for row in meshes] == ["data 8", "fsdp 8"]
    assert meshes[0]["arguments MiB"] > meshes[1]["arguments MiB"]
    assert losses[0]["loss"] != losses[1]["loss"] == pytest.approx(losses[0]["loss"], rel=0.02)


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
    questions, rows = (str(tmp_path / name) for name in FILES.values())
    (article,) = json.loads(Path(questions).read_text("utf-8"))["data"]
    parts = [{"title": "one", "paragraphs": [part]} for part in article["paragraphs"]]
    Path(questions).write_text(json.dumps({"data": parts}), "utf-8")
    words = ["--config", str(write_bert(tmp_path)), "--sst2", rows, rows, "--squad", questions]
    words += ["--seeds", "2"]
    loss, sst2, squad = bench("lms", *words)
    assert [row.get("verdict") for row in loss] == [None, "outside", "outside"]
    for metric, unit, table in (("accuracy", 1, sst2), ("f1", 100, squad)):
        found = [row[metric] / unit - 0.01 for row in table]
        assert found == pytest.approx([*score.values()])
    tuned = [config for config in seen if isinstance(config, FinetuneConfig)]
    assert len({config.name for config in seen}) == len(seen) == 6 + 12
    for config in tuned:  # each from the model of its own format and seed
        own = f"tiny-bert-{config.precision.policy}" + ("-seed1" if config.seed else "")
        assert config.init == str(tmp_path / "runs" / own)
        assert config.data.sequence_length == 16
    split = tmp_path / "runs" / "tiny-bert-squad"  # of eight articles one is for validation
    texts = [(split / f"{name}.json").read_text() for name in ("train", "validation")]
    assert [len(json.loads(text)["data"]) for text in texts] == [11, 1]


def test_character_models_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    formats = [(of, policy) for of in ("unitscale", "plain") for policy in ("float32", "float16")]
    models = [(1.0, 1.004, 1.1, 1.2), (1.0, 1.1, 0.9, 0.9), (2.0, 1.9, 2.0, math.inf)]
    point: Any = None
    curves = [[Curve(point, {1.0: loss}) for loss in model] for model in models]
    losses = [dict(zip(formats, model, strict=True)) for model in curves]
    for name, given in (("is_run", True), ("load_config", None), ("make_points", [])):
        monkeypatch.setattr(lms, name, lambda *_, given=given: given)
    monkeypatch.setattr(lms, "read_curves", lambda *_: [])
    monkeypatch.setattr(lms, "by_format", lambda _: dict(enumerate(losses)))
    rows = lms.study(tmp_path).rows
    assert [(row["count"], row["of"]) for row in rows] == [(2, 3), (1, 3), (2, 3)]


class _InThisProcess:
    def __init__(self, *args: Any, **options: Any):
        self.map = map

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.mark.slow
def test_step(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(step, "ProcessPoolExecutor", _InThisProcess)
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
        configs = {row: step.config_of(shape, row) for row in (step.ROWS | step.MORE)}
        assert len({(c.model.width, c.data.step_size) for c in configs.values()}) == 1
        scaled = [row for row, config in configs.items() if config.precision.scaled_state]
        assert scaled == ["fp8-scaled", "fp8-readout-scaled"]


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
    rows = "plain-bfloat16,fp8,scalify-float16"
    words = ("--shapes", "llama-1b", "--rows", rows, "--top", "2", "--dump", str(tmp_path / "hlo"))
    small = ("model.width=64", "model.heads=4", *TINY[2:5], "data.sequence_length=64")
    steps, places = bench("h200", *words, *small)
    plain, fp8, scalified = steps
    assert plain["FP8 matmuls"].startswith("0 of ")
    assert int(fp8["FP8 matmuls"].split()[0]) > 0 == fp8["amax"]
    assert all(row["attention ms"] > 0 for row in (plain, scalified))
    assert fp8["over plain"] == pytest.approx(fp8["projected ms"] / plain["projected ms"])
    assert len(places) == 2
    names = {f"llama-1b-{row['program']}.hlo" for row in steps}
    assert {path.name for path in (tmp_path / "hlo").iterdir()} == names


class WrongSine:
    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    def sin(self, x: Any) -> Any:
        return jnp.sin(x) * 1.25


@pytest.mark.slow
def test_fuzz(bench: Any) -> None:
    (rows,) = bench("fuzz", "--programs", "4")
    assert sum(row["agree"] + row["left out"] for row in rows) == 4
    assert all(row["within"] for row in rows)


def test_fuzz_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong sine in a longer program is found, and the program shortened."""
    lines = {"v0": "i0 + 1", "v1": "jnp.sin(v0)", "v2": "v1 * 3", "v3": "abs(i1)"}
    tried = program("operators", *lines.values(), i1=ONES)
    assert fuzz.check(tried) is None
    monkeypatch.setattr(fuzz, "SCALED", fuzz.SCALED | {"jnp": WrongSine()})
    assert fuzz.check(tried)
    small = fuzz.smaller(tried, fuzz.check)
    assert dict(small.lines) == {"v0": "i0 + 1", "v1": "jnp.sin(v0)"}
    assert list(small.inputs) == ["i0"]
    space: dict[str, Any] = {"jnp": jnp, "ScaledArray": ScaledArray}
    exec(fuzz.listing(small), space)
    assert space["f"](space["i0"])[0].shape == (2, 2)


ONES = fuzz.Input(np.float16([[1.5, -2.0], [0.25, 3.0]]), np.float32(4))
EIGHT = fuzz.Input(np.asarray([[-0.40625, 0.9375, -0.0546875]], jnp.float8_e4m3fn), np.float32(4))


def program(kind: str, *lines: str, **inputs: fuzz.Input) -> fuzz.Program:
    named = tuple((f"v{i}", text) for i, text in enumerate(lines))
    return fuzz.Program(kind, {"i0": ONES, **inputs}, named)


RIGHT = [
    program("ops", "ops.gelu(i0)", "v0.sum(-1)"),
    program("quant", "product(i0, i0)"),
    program("scalify", "jnp.tanh(i0)", "v0 @ i0"),
    program("control", "lax.scan(lambda c, v: (c * 0.5 + v, c), i0[0], i0)[1]"),
    # An optimizer computes in float32.
    program("optim", "step(optax.adagrad(0.1), i0, i0)"),
    # A value rounded to 8 bits may lie on either side of the original.
    program("quant", "q8(i0, 'e5m2')", "v0 > i0", i0=ONES._replace(data=np.float16([1.2041]))),
    # The magnitude of complex numbers is rounded.
    program("scalify", "jnp.abs(jnp.fft.fft(i0))", "jnp.minimum(v0, i0)", i0=EIGHT),
    # E4M3 has no infinity.
    program("quant", "q8(i0)", "v0 + 1", i0=ONES._replace(data=np.float32([0.0, np.inf]))),
    # The compiler makes zero of NaN times a mask that is false.
    program("control", "i0.max(-1)", i0=ONES._replace(data=np.float32([[np.nan, 1.0]]))),
]


@pytest.mark.slow
@pytest.mark.parametrize("tried", RIGHT, ids=lambda p: f"{p.kind} {p.lines[-1][1]}")
def test_fuzz_finds_that_what_is_right_agrees(tried: fuzz.Program) -> None:
    assert fuzz.check(tried) is None


def test_fuzz_leaves_out_what_no_law_holds_for() -> None:
    far = ONES._replace(scale=np.float32(2.0**60))
    assert fuzz.check(program("scalify", "i0 * i0 * i0", i0=far)) == ""
    assert fuzz.check(program("quant", "product(i0, i0[0])")) == ""
    first, again, other = (fuzz.listing(fuzz.draw(seed, 3)) for seed in (0, 0, 1))
    assert first == again != other

"""`bench gpu` at toy size on a CPU: each part, and what becomes of one that fails."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from recipes.bench import _gpu_parts, gpu
from recipes.bench._gpu_parts import PARTS, USUAL, Setting
from recipes.cli import main
from recipes.errors import RecipeError
from tests.recipes.tasks import squad

FACTS = {"device": "a GPU", "jax": "0.11.2", "date": "2026-01-02"}
TIMES = ("measured ms", "projected ms", "over projected")


def check_times(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        measured, projected, over = (row[name] for name in TIMES)
        assert 0 < projected < math.inf
        assert over == pytest.approx(measured / projected)


@pytest.mark.slow
@pytest.mark.parametrize("row", ["plain-bfloat16", "fp8"])
def test_a_step(row: str) -> None:
    rows = PARTS[f"llama-1b {row}"](Setting(toy=True))
    check_times(rows)
    (found,) = rows
    assert found["program"] == row
    assert 0 < found["loss"] < 10
    assert found["tokens per second"] == pytest.approx(1e3 * 64 / found["measured ms"])
    ratio = found["projected tokens per second"] / found["tokens per second"]
    assert ratio == pytest.approx(found["over projected"])
    # Of times all that is not measured is called projected.
    assert all(n.startswith("projected") for n in found if n.endswith(" ms") and n != TIMES[0])


@pytest.mark.slow
@pytest.mark.parametrize(("part", "rows"), [("products", 7), ("attention", 2), ("optimizer", 2)])
def test_a_part(part: str, rows: int) -> None:
    found = PARTS[part](Setting(toy=True))
    assert len(found) == rows
    check_times(found)


@pytest.mark.slow
def test_losses(text_file: Path, tmp_path: Path) -> None:
    rows = PARTS["losses"](Setting(True, str(text_file), tmp_path / "runs"))
    assert [row["variant"] for row in rows] == ["float32", "float16", "fp8"]
    assert all(row["standard deviation"] > 0 for row in rows)
    assert len(list((tmp_path / "runs").iterdir())) == 3 * 2


@pytest.mark.slow
def test_answers(text_file: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--squad: expected a file"):
        PARTS["answers"](Setting(True, str(text_file), tmp_path))
    file, tree = tmp_path / "questions.json", squad(["fox"] * 16)
    articles = [{"title": "", "paragraphs": [part]} for part in tree["data"][0]["paragraphs"]]
    file.write_text(json.dumps(tree | {"data": articles}), encoding="utf-8")
    rows = PARTS["answers"](Setting(True, str(text_file), tmp_path / "runs", str(file)))
    found = ["fp8", "fp8", "random span", "sentence with most words of the question"]
    assert [row["variant"] for row in rows] == found
    assert 0 < rows[0]["validation loss"] < 10
    assert all(0 <= row["f1"] <= 100 for row in rows[1:])


def test_weight_gradients_are_those_of_numpy() -> None:
    draw = np.random.default_rng(0).normal
    x, dy = (jnp.asarray(draw(size=(64, n)), jnp.bfloat16) for n in (8, 16))
    wanted = np.asarray(x, np.float64).T @ np.asarray(dy, np.float64)
    for how, work in _gpu_parts.WEIGHT_GRADIENTS.items():
        found = np.asarray(work(x, dy), np.float64)
        found *= np.linalg.norm(wanted) / np.linalg.norm(found)  # `ops.dense` has a factor
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        assert error < (0.01 if how == "bfloat16" else 0.1), how


def test_calls_take_turns_and_the_first_round_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 100.0, 100.0, 101.0, 200.0, 204.0, 300.0, 306.0])
    monkeypatch.setattr(_gpu_parts.time, "perf_counter", lambda: next(clock))
    seen = []
    assert _gpu_parts.per_call(seen.append, 2, rounds=3) == 2.0
    assert seen == list(range(8))


def test_every_row_of_every_shape_has_a_part() -> None:
    names = [f"{shape} {row}" for shape in gpu.SHAPES for row in _gpu_parts.ROWS]
    others = {"tests", "products", "attention", "optimizer", "losses", "answers"}
    assert set(USUAL) == {*names, *others}
    asked = {f"{shape} {row}" for shape in gpu.SHAPES for row in _gpu_parts.MORE}
    assert set(PARTS) == {*USUAL, *asked}


def test_a_part_that_fails_is_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out, written = tmp_path / "deep" / "gpu.json", []

    def launched(name: str, **told: Any) -> dict[str, Any]:
        written.append(len(json.loads(out.read_text())["parts"]) if out.exists() else 0)
        assert told["toy"]
        if name == "attention":
            return {"status": "failed", "error": "exit code 1", "printed": "no such kernel"}
        row = {"program": name.split(" ")[-1], "measured ms": 2.0}
        return {"status": "done", "rows": [row], **FACTS}

    monkeypatch.setattr(gpu, "launched", launched)
    assert main(["bench", "gpu", "--toy", "--out", str(out)]) == 1
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == [name for name in USUAL if name != "answers"]  # without a --squad
    assert written == list(range(len(parts)))
    assert parts["attention"]["printed"] == "no such kernel"
    said = capsys.readouterr()
    assert "bench gpu: failed: attention; see" in said.err
    for text in ("Training step of gpt2-small, a GPU", "Losses, a GPU", "exit code 1"):
        assert text in said.out


def test_what_a_file_has_is_not_measured_again_and_is_published_as_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """On another machine, too: the file says which."""
    out, published = tmp_path / "gpu.json", tmp_path / "published.json"
    kinds = {f"measured {kind} ms": 0.5 for kind in gpu.KINDS}
    steps = {"plain-bfloat16": 20.0, "qwix": 25.0, "fp8-scaled": 16.0}
    parts: dict[str, Any] = {
        f"gpt2-small {name}": {
            "status": "done",
            "rows": [
                {"program": name, "measured ms": time, "peak MiB": time, "kernels run": 9, **kinds}
            ],
            **FACTS,
        }
        for name, time in steps.items()
    }
    parts["attention"] = {"status": "failed", "error": "no such kernel"}
    out.write_text(json.dumps({"benchmark": "gpu", "parts": parts}))
    monkeypatch.setattr(gpu, "backend", lambda: "cpu")
    names = ",".join(f"gpt2-small {name}" for name in steps)
    command = ["bench", "gpu", "--out", str(out), "--parts"]
    assert main([*command, names, "--json", str(published)]) == 0
    document = json.loads(published.read_text())
    assert (document["machine"], document["versions"]) == ("a GPU", {"jax": "0.11.2"})
    assert document["date"] == FACTS["date"]
    step, kernels, judged = document["tables"]
    assert step["title"] == "Training step of gpt2-small, a GPU"
    assert [row["measured attention ms"] for row in kernels["rows"]] == [0.5] * 3
    assert [row["value"] for row in judged["rows"]] == [0.8, 0.8, 0.64, 0.64]
    assert [row.get("within") for row in judged["rows"]] == [False, None, True, None]
    assert main([*command, f"attention,{names}"]) == 2  # what failed is measured again
    assert "expected JAX to see a GPU; it sees cpu" in capsys.readouterr().err
    assert main([*command, names, "--fresh"]) == 2
    before = out.read_text()
    assert main([*command, names, "--toy"]) == 2
    assert "has results without --toy; give another file" in capsys.readouterr().err
    assert out.read_text() == before
    for text in ("{", "[]", '{"parts": 3}'):
        out.write_text(text)
        assert main([*command, names]) == 2
        assert "--out: expected a file of this benchmark" in capsys.readouterr().err


def test_what_no_time_is_left_for_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(gpu, "backend", lambda: "gpu")
    monkeypatch.setattr(
        gpu, "launched", lambda name, **told: {"status": "done", "rows": [], **FACTS}
    )
    clock = iter([0.0, 10.0, 40.0])
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(clock))
    out = tmp_path / "gpu.json"
    command = ["bench", "gpu", "--parts", "products,attention", "--minutes", "1", "--out", str(out)]
    assert main(command) == 0
    parts = json.loads(out.read_text())["parts"]
    assert [part["status"] for part in parts.values()] == ["done", "left out"]
    assert "1 minutes were over" in capsys.readouterr().out


def test_without_a_gpu_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(gpu, "backend", lambda: "cpu")
    assert main(["bench", "gpu"]) == 2
    assert "expected JAX to see a GPU; it sees cpu" in capsys.readouterr().err
    assert main(["bench", "gpu", "--parts", "speed"]) == 2
    assert "--parts: expected some of gpt2-small plain-bfloat16" in capsys.readouterr().err
    assert main(["bench", "gpu", "--parts", "answers"]) == 2
    assert "--parts answers: expected questions too" in capsys.readouterr().err


@pytest.mark.slow
def test_a_part_in_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert main(["bench", "gpu", "--toy", "--parts", "tests,attention", "--out", str(out)]) == 0
    parts = json.loads(out.read_text())["parts"]
    assert [part["status"] for part in parts.values()] == ["done", "done"]
    check_times(parts["attention"]["rows"])
    failed = gpu.launched("no such part", toy=True, texts={}, limit=60.0)
    assert failed["status"] == "failed"
    assert "--part: expected some of gpt2-small" in failed["printed"]
    late = gpu.launched("attention", toy=True, texts={}, limit=0.1)
    assert (late["status"], late["error"]) == ("failed", "not done after 0 s")

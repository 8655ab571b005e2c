"""`bench h200`: its tables, and whole toy steps compiled for an H200."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import pytest

from recipes.bench import h200
from recipes.bench._programs import (
    BEST,
    PEER,
    READOUT,
    REFERENCE,
    SCALIFIED,
    UNSCALED,
    Program,
    config_of,
)
from recipes.bench.aot import roofline
from recipes.cli import main
from tests.recipes.bench.test_programs import TEXT
from unitscale.quant import check_fp8


def of(temporaries: int, more: int = 1) -> Program:
    """A program; `more` of its elements in the kernels that are not products."""
    text = TEXT.replace("f32[100]", f"f32[{100 * more}]")
    return Program(text, roofline(text), check_fp8(text), temporaries, 100, 300)


def test_the_best_is_judged_by_ratios() -> None:
    found = {REFERENCE: of(1000, more=10**6), PEER: of(1000), "fp8": of(9), READOUT: of(9)}
    found[BEST] = of(400)
    rows = {row["figure"]: row for row in h200.judged("gpt2-small", found).rows}
    time = rows["projected step over plain-bfloat16"]
    assert time["value"] == found[BEST].projection.seconds / found[REFERENCE].projection.seconds
    assert (time["asked"], time["within"]) == ("<= 0.65", time["value"] <= 0.65)
    assert rows["temporaries over plain-bfloat16"]["value"] == 0.4
    assert rows["temporaries over plain-bfloat16"]["within"]
    assert rows["projected step over qwix"]["value"] == 1.0
    assert not rows["projected step over qwix"]["within"]
    assert rows["optimizer, bytes a parameter"]["within"]
    assert rows["FP8 share of the operations of Dense"]["within"]
    assert not rows["FP8 share of the operations of the readout, fp8-readout"]["within"]
    assert rows["amax reductions of fp8"]["within"]
    llama = h200.judged("llama-1b", found).rows
    assert llama[0]["asked"] == "<= 0.62"
    assert not h200.judged("gpt2-small", {REFERENCE: of(1)}).rows


def test_scalify_is_judged_by_the_plain_program() -> None:
    found = {UNSCALED: of(1), SCALIFIED: of(1, more=10**6)}
    table = h200.judged("gpt2-small", found)
    (row,) = table.rows
    assert table.title == "What is asked of scalify-float16, gpt2-small"
    assert row["figure"] == "projected step of scalify-float16 over plain-float16"
    assert row["value"] > 1.05
    assert not row["within"]
    configs = [config_of("gpt2-small", name, toy=True) for name in found]
    assert [config.policy for config in configs] == ["float16", "float32"]
    assert [config.scalify is None for config in configs] == [True, False]


def test_every_time_is_called_projected() -> None:
    found = {REFERENCE: of(1), BEST: of(1)}
    times = h200.times("gpt2-small", found)
    assert "projected" in times.title
    assert "8 x 1,024 tokens" in times.title
    assert times.rows[1]["time over plain-bfloat16"] == 1.0
    assert h200.places("gpt2-small", found, 1).columns[0] == "projected ms"
    assert len(h200.places("gpt2-small", found, 1).rows) == 1


def test_without_the_plugin_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(h200, "h200_available", lambda: False)
    assert main(["bench", "h200"]) == 2
    said = capsys.readouterr().err
    assert "bench h200: expected the CUDA plugin for JAX" in said
    assert f'pip install "jax-cuda13-plugin=={jax.__version__}"' in said


@pytest.mark.h200
@pytest.mark.slow
def test_toy_steps_are_compiled_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h200, "config_of", functools.partial(config_of, toy=True))
    out, rows = tmp_path / "out.json", "plain-bfloat16,bfloat16,fp8-readout"
    command = ["bench", "h200", "--rows", rows, "--dump", str(tmp_path / "programs")]
    assert main([*command, "--json", str(out)]) == 0
    kept = sorted(p.relative_to(tmp_path / "programs").as_posix() for p in tmp_path.rglob("*.hlo"))
    names = [f"{name}.hlo" for name in sorted(rows.split(","))]
    assert kept == sorted([*names, *(f"llama-1b/{name}" for name in names)])
    tables = {t["title"]: t["rows"] for t in json.loads(out.read_text("utf-8"))["tables"]}
    steps = [rows for title, rows in tables.items() if title.startswith("Training step")]
    held = [rows for title, rows in tables.items() if title.startswith("Memory and")]
    assert len(steps) == len(held) == 2
    for plain, half, _ in steps:
        assert plain["attention ms"] > 0
        assert half["attention ms"] == plain["attention ms"]
    for plain, half, fp8 in held:
        assert (half["FP8 of Dense"], fp8["FP8 of Dense"], fp8["amax"]) == (0.0, 1.0, 0)
        assert (half["FP8 of readout"], fp8["FP8 of readout"]) == (0.0, 1.0)
        assert 20 < plain["optimizer B/param"] < 40

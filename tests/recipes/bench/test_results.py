"""The page of results and README's table say what the files of results do."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.bench import results
from recipes.cli import main
from recipes.errors import RecipeError

ROOT = Path(__file__).parents[3]


def test_the_page_of_results_is_that_of_the_files() -> None:
    stored = (ROOT / "notebooks" / "docs" / "results.md").read_text("utf-8")
    assert stored.rstrip("\n").splitlines() == list(results.page())


def test_readme_shows_figures_of_files() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    table = list(results.figures())
    start = lines.index(table[0])
    assert lines[start : start + len(table)] == table
    assert len(table) == 2 + len(results.FIGURES)


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows: list[dict[str, Any]] = [
        {"what": "fast", "ratio": 0.5, "asked": "<= 1", "within": True},
        {"what": "slow", "ratio": 2.0, "asked": "<= 1", "within": False},
    ]
    document = {
        "benchmark": "demo",
        "command": "python -m recipes bench demo",
        "date": "2026-01-02",
        "versions": {"python": "3.11", "jax": "0.10.2"},
        "machine": "cpu, 2 cores",
        "tables": [{"title": "Speeds", "rows": rows}],
        "notes": ["A note."],
    }
    (tmp_path / "demo.json").write_text(json.dumps(document))
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    return tmp_path


def test_misses_come_first(given: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", "results"]) == 0
    printed = capsys.readouterr().out.splitlines()
    at = {
        name: printed.index(line)
        for name, line in {
            "missed": "| Speeds | what slow; ratio 2.000; asked <= 1 | [demo](#demo) |",
            "heading": "## demo",
            "command": "`python -m recipes bench demo`",
            "machine": "2026-01-02, cpu, 2 cores, python 3.11, jax 0.10.2.",
            "row": "| fast | 0.500 | <= 1 | yes |",
            "note": "A note.",
        }.items()
    }
    assert sorted(at, key=lambda name: at[name]) == list(at)
    assert sum("what fast" in line for line in printed) == 0


def test_a_figure_is_one_row_of_a_file(
    given: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    rows: list[Any] = [{"what": "fast"}, "ratio"]
    shown = [results.Figure("speed", "demo.json", row, "{ratio:.2f} times") for row in rows]
    monkeypatch.setattr(results, "FIGURES", shown)
    assert main(["bench", "results", "--readme"]) == 0
    _, _, fast, slow = capsys.readouterr().out.splitlines()
    assert fast == "| speed | <= 1 | 0.50 times | `python -m recipes bench demo` |"
    assert slow == "| speed | <= 1 | **missed**: 2.00 times | same |"
    absent = results.Figure("speed", "demo.json", {"what": "none"}, "{ratio}")
    monkeypatch.setattr(results, "FIGURES", [absent])
    with pytest.raises(RecipeError, match=r"demo\.json: expected one row with .*none.*; got 0"):
        list(results.figures())

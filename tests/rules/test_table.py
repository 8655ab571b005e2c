"""The table of rules: every public rule has a formula and a source."""

import inspect
import runpy
from pathlib import Path

import pytest

from unitscale import rules

ROOT = Path(__file__).parents[2]
HELPERS = {
    "closed_form",
    "constrain",
    "normalized_weights",
    "logit_factor",
    "simulate",
    "table",
    "table_page",
}


def test_every_rule_has_a_row() -> None:
    public = {
        name
        for name, value in vars(rules).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    assert {row.name for row in rules.table()} == public - HELPERS


def test_every_row_states_formula_and_paper() -> None:
    for row in rules.table():
        assert len(row.formula) > 40, row
        assert "arXiv 2303.11257" in row.source or "arXiv 2407.17465" in row.source, row
        assert "Args" not in row.formula


def test_the_page_is_current() -> None:
    page = ROOT / "notebooks" / "docs" / "rules.md"
    assert page.read_text("utf-8") == rules.table_page(), "python -m unitscale.rules > the page"


def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("unitscale.rules", run_name="__main__")
    assert capsys.readouterr().out == rules.table_page()

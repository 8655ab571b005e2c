"""The table of rules: every public rule has a formula and a source."""

from __future__ import annotations

import inspect

from unitscale import rules

HELPERS = {
    "closed_form",
    "constrain",
    "normalized_weights",
    "logit_factor",
    "simulate",
    "table",
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

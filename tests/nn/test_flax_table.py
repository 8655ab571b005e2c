"""Constructors have the names, the order and the defaults of flax, or a stated reason."""

import inspect
import runpy
from pathlib import Path

import flax
import pytest
from flax import nnx

from unitscale import nn
from unitscale.nn._flax_table import (
    MISSING,
    REASONS,
    TWINS,
    arguments,
    flax_page,
    parameters,
    reason,
)

PAGE = Path(__file__).parents[2] / "notebooks" / "docs" / "flax.md"
# Modules that have no twin: blocks, and what flax has under no name.
OWN = {
    "DotGeneral",
    "EinsumOp",
    "ExpertDense",
    "MLP",
    "MoE",
    "PositionalEmbed",
    "RHNCell",
    "RNNCell",
    "Readout",
    "Residual",
    "TransformerLayer",
    "TransformerStack",
}
# Modules of flax that hold others, or are of no layer, which serve here too.
SHARED = {"Dict", "List", "Module", "RNNCellBase", "Sequential"}


def modules(package) -> set[str]:
    found = {n: c for n, c in vars(package).items() if inspect.isclass(c)}
    return {n for n, c in found.items() if issubclass(c, nnx.Module)}


def test_every_module_has_a_twin_or_is_accounted_for() -> None:
    twins = {cls.__name__ for cls in TWINS} - {"Optimizer"}
    assert modules(nn) == twins | OWN | {"Linear"}
    flaxs = {cls.__name__ for cls in TWINS.values()} - {"Optimizer"}
    newer = {"RoPE"} - modules(nnx)  # of Flax 0.12.12, and the page is one for all
    assert modules(nnx) - flaxs - SHARED == MISSING.keys() - newer


@pytest.mark.parametrize("cls", TWINS, ids=lambda cls: cls.__name__)
def test_what_differs_has_a_reason(cls) -> None:
    rows = arguments(cls)
    assert {row.name for row in rows if row.same} >= {next(iter(parameters(cls)))}
    unsaid = [row.name for row in rows if not row.same and not reason(cls, row.name)]
    assert not unsaid


@pytest.mark.parametrize("cls", TWINS, ids=lambda cls: cls.__name__)
def test_shared_arguments_have_the_order_and_kind_of_flax(cls) -> None:
    ours, flaxs = parameters(cls), parameters(TWINS[cls])
    shared = [name for name in ours if name in flaxs]
    if cls is not nn.SimpleCell:  # whose own keywords come before those of all cells
        assert shared == [name for name in flaxs if name in ours]
    assert [ours[name].kind for name in shared] == [flaxs[name].kind for name in shared]
    positional = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [n for n, p in flaxs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]


def test_every_reason_is_needed() -> None:
    needed = {(cls.__name__, r.name) for cls in TWINS for r in arguments(cls) if not r.same}
    for key in REASONS:
        owner, _, name = key.rpartition(".")
        assert any(name == n and owner in ("", c) for c, n in needed), key


def test_the_page_is_current() -> None:
    page = PAGE.read_text("utf-8")
    if f"with Flax {flax.__version__}:" in page:
        assert page == flax_page(), "python -m unitscale.nn > the page"
    else:
        assert "| argument | here | `flax.nnx` | why |" in page


def test_the_command_prints_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_module("unitscale.nn", run_name="__main__")
    assert capsys.readouterr().out == flax_page()

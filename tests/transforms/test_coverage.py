"""The page of all primitives is that of this JAX, and complete."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import jax

from unitscale.transforms import coverage, coverage_page, unlisted

PAGE = Path(__file__).parents[2] / "notebooks" / "scalify-coverage.md"


def test_every_differentiable_primitive_is_listed() -> None:
    """Kernels of Pallas are not asked for, though it is imported."""
    importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention")
    assert unlisted() == []


def test_the_page_is_current() -> None:
    page = PAGE.read_text("utf-8")
    if f"with JAX {jax.__version__}:" in page:
        assert page == coverage_page(), "python -m unitscale.transforms > the page"
    else:
        assert "| category | rule | primitives |" in page


def test_the_command_prints_the_page() -> None:
    """Where the environment disables jit, too: the package is to be imported there."""
    command = [sys.executable, "-m", "unitscale.transforms"]
    root = PAGE.parents[1]
    env = os.environ | {"JAX_DISABLE_JIT": "1"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == coverage_page()


def test_every_row_says_what_its_rule_does() -> None:
    for row in coverage().splitlines()[2:]:
        category, summary, primitives = (c.strip() for c in row.strip("| ").split(" | "))
        assert category
        assert summary.endswith((".", "each"))
        assert primitives.startswith("`")

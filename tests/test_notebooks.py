"""Notebooks run from top to bottom without warnings, and print what they printed when saved."""

import os
import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
VARIES = "varies"
"""The tag of a cell whose words depend on rounding, as the text that a model writes does."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|\b(nan|inf)\b")


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[str]:
    """List the kinds of a cell's outputs."""
    return [o.get("name") or " ".join(sorted(o.get("data", [o.output_type]))) for o in cell.outputs]


def words(cell: Any) -> list[str]:
    """Return the words that a cell printed, without numbers, which differ between machines."""
    text = "".join(o.text for o in cell.outputs if o.output_type == "stream")
    return NUMBER.sub("#", text).split()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Start notebooks with this interpreter and library, on one CPU device.

    XLA's log is off, because it reports slow operations, which depend on the machine's load.
    Warnings of Python are shown, so that they differ from the saved output.
    """
    home = str(tmp_path_factory.mktemp("home"))
    settings = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "IPYTHONDIR": home, "JUPYTER_PREFER_ENV_PATH": "1"}
    return {**os.environ, **settings, **quiet}


@pytest.mark.parametrize("name", NAMES)
def test_saved_outputs_are_those_of_one_clean_run(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    shown = {kind for cell in cells for kind in kinds(cell)}
    assert shown <= {"stdout", "text/plain", "image/png text/plain"}, shown
    assert any("image/png" in kind for kind in shown)
    text = nbformat.writes(notebook)
    for private in ("/home/", "/root/", "/tmp/", "/Users/", "site-packages"):
        assert private not in text
    assert all(cell.metadata in ({}, {"tags": [VARIES]}) for cell in notebook.cells)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_says_what_it_said(name: str, environment: dict[str, str]) -> None:
    saved, notebook = read(name), read(name)
    client = nbclient.NotebookClient(
        notebook,
        timeout=None,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute(env=environment)
    for before, after in zip(code_cells(saved), code_cells(notebook), strict=True):
        assert kinds(after) == kinds(before), after.source
        if VARIES not in before.metadata.get("tags", ()):
            assert words(after) == words(before), after.source

"""Pages of documentation, run as they are and with the layers of `unitscale.nn`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.bench import flax
from recipes.cli import main

LAYER = """# A page

```{code-cell} ipython3
---
collapsed: true
---
from flax import nnx
import jax.numpy as jnp
! pip install flax
layer = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
y = layer(jnp.ones((3, 4)))
y
```

```{code-cell}
:tags: [skip-execution]

raise RuntimeError
```
"""
PAGES = {
    "runs.md": LAYER + "\n  ```python\n  y.shape\n  if True:\n    y + 1\n  ```\n",
    "guides/both.md": LAYER + "\n```python\nimport no_such_module\n```\n",
    "guides/ours.md": LAYER + "\n```python\ny.addressable_data(0)\n```\n",
    "values.md": LAYER + "\n```python\nassert (y == layer.kernel[...].sum(0)).all()\n```\n",
    "nothing.md": "```python\nimport no_such_module\nno_such_module.nnx.Linear\n```\n",
    "alike.md": "```python\nfrom flax import nnx\nnnx.Rngs(0)\n```\n",
    "prose.md": "nnx.Linear\n",
}  # fmt: skip


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name, text in PAGES.items():
        path = tmp_path / "docs_nnx" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (tmp_path / "docs_nnx" / "runs.ipynb").write_text("no JSON, and a twin", encoding="utf-8")
    return tmp_path


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(page: Path, which: str, limit: float) -> dict[int, Any]:
        del limit
        return dict(enumerate(flax.outcomes(flax.cells(page), which)))

    monkeypatch.setattr(flax, "launched", launched)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def test_the_table(in_this_process: None, clone: Path, capsys: pytest.CaptureFixture) -> None:
    out = clone / "out.json"
    assert main(["bench", "flax", str(clone), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    rows, failed = (table["rows"] for table in json.loads(out.read_text("utf-8"))["tables"])
    assert {row["page"]: tuple(row.values())[1:] for row in rows} == {
        "guides/both.md": (2, 1, 1, 0, True, "runs"),
        "guides/ours.md": (2, 2, 1, 0, True, "fails"),
        "nothing.md": (1, 0, 0, 0, True, "nothing to run"),
        "runs.md": (2, 2, 2, 0, True, "runs"),
        "values.md": (2, 2, 1, 1, True, "other values"),
    }
    ours, values = failed
    assert (ours["page"], ours["cell"]) == ("guides/ours.md", 1)
    assert ours["error"].startswith("AttributeError: 'ScaledArray' object has no attribute 'addr")
    assert ours["line"] == 1
    assert values["error"] == "AssertionError:"
    assert "ScaledArray(float32[3,2], scale=None)" in printed  # the value of a cell
    assert "2 of 4 pages" in printed
    assert "left out: 2 pages" in printed


def test_pages_that_are_asked_for(
    in_this_process: None, clone: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["bench", "flax", str(clone / "docs_nnx"), "--only"]
    assert main([*words, "runs"]) == 0
    assert "1 of 1 pages" in capsys.readouterr().out
    assert main([*words, "misspelt"]) == 2
    assert "expected pages with layers" in capsys.readouterr().err


def test_cells_of_other_formats(tmp_path: Path) -> None:
    page = tmp_path / "page.rst"
    page.write_text(
        "Text\n\n.. testcode:: A, B\n  :name: x\n\n  one\n\n  two\n\n.. codediff::\n  :title: y\n\n"
        "  left\n  ---\n  right\n\nText\n\n    .. code-block:: python\n\n      if x:\n        y\n"
    )
    found = [cell.strip() for cell in flax.cells(page)]
    assert found == ["one\n\ntwo", "left", "right", "if x:\n  y"]
    book = tmp_path / "book.ipynb"
    parts = [("code", ["one\n", "two"]), ("markdown", ["text"])]
    cells = [{"cell_type": kind, "source": source} for kind, source in parts]
    book.write_text(json.dumps({"cells": cells}))
    assert flax.cells(book) == ["one\ntwo"]
    assert flax.pages(tmp_path) == [book, page]


@pytest.mark.slow
def test_a_page_has_a_process_and_a_time_limit(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    cells = ["nnx = open('left', 'w')", "1 / 0", "import os; os._exit(3)", "nnx"]
    page.write_text("".join(f"```python\n{cell}\n```\n" for cell in cells))
    found = flax.launched(page, "plain", limit=100.0)
    assert (list(found), found[0]) == ([0, 1], None)
    assert found[1] == {"error": "ZeroDivisionError: division by zero", "line": 1}
    assert not Path("left").exists()
    page.write_text("```python\nimport time\ntime.sleep(1000)\n```\n")
    assert flax.launched(page, "plain", limit=10.0) == {}

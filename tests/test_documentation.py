"""Python blocks of README and documentation run, in the order of the page.

Blocks marked `python` are programs, or continue the block before. Blocks marked `py` do not run.
"""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "notebooks" / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if BLOCK.search(p.read_text()))


def test_pages_have_programs() -> None:
    assert {"guide.md", "how-to/other-libraries.md", "how-to/five-bytes.md"} <= set(PAGES)


def run_programs(page: Path) -> None:
    names: dict[str, object] = {"__name__": page.name}
    for block in BLOCK.findall(page.read_text("utf-8")):
        exec(compile(block, page, "exec"), names)
    assert len(names) > 2


@pytest.mark.slow
def test_the_readme_trains_a_classifier(capsys: pytest.CaptureFixture[str]) -> None:
    run_programs(README)
    assert float(re.findall(r"accuracy (\d+)%", capsys.readouterr().out)[0]) > 85


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_programs_run(page: str) -> None:
    run_programs(DOCS / page)

"""Python blocks of README and documentation run, in the order of the page.

Blocks marked `python` are programs, or continue the block before. Blocks marked `py` do not run.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from unitscale import optim, parallel, transforms

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


# Default values, which users rely on and the documentation states.
E4M3 = jnp.float8_e4m3fn
ROUNDING = {"rounding": "nearest", "key": None}
DEFAULTS: dict[Callable[..., Any], dict[str, Any]] = {
    transforms.scalify: {"static_scaling": "unit", "decouple": False},
    transforms.set_scaling: {"on": "forward"},
    transforms.cast_data: {"on": "forward"},
    transforms.dynamic_rescale: {"statistic": "rms", "on": "forward"},
    optim.scaled: {"weights": jnp.float16, "moments": (E4M3, jnp.float16), "min_size": 4096}
    | {"rounding": "nearest", "key": 0, "block": None},
    optim.ema: {"debias": True, "accumulator_dtype": jnp.float32},
    optim.umup: {"optimizer": "adam", "readout_constraint": None, "multipliers": None},
    optim.Moment: {"root": False, "block": None},
    parallel.all_reduce: {"dtype": E4M3, "mu": 1.0, "small": 1024, "small_dtype": jnp.float32}
    | ROUNDING,
    parallel.reduce_scatter: {"dtype": E4M3, "axis": 0} | ROUNDING,
    parallel.all_gather: {"dtype": E4M3, "axis": 0} | ROUNDING,
    parallel.train_step: {"axis_name": "data", "dtype": E4M3, "small": 1024, "donate": True},
    parallel.param_shardings: {"small": 1024},
    parallel.initialize: {"detect": False, "timeout": 300, "heartbeat": 100},
    parallel.AutoScale.create: {"threshold": 1e-5, "recovery": 1000, "largest": 2.0**8},
}


@pytest.mark.parametrize("function", DEFAULTS, ids=lambda f: f.__qualname__)
def test_defaults(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    found = {name: parameters[name].default for name in DEFAULTS[function]}
    assert found == DEFAULTS[function]

import dataclasses
import io

import jax.numpy as jnp
import pytest
from rich.console import Console

from unitscale.analysis import trace_scales


@pytest.fixture(scope="module")
def trace():
    return trace_scales(lambda x: {"y": 3 * jnp.sin(x)})(jnp.ones(4))


def test_is_a_sequence_of_frozen_records(trace) -> None:
    assert len(trace) == 3
    assert trace[0] is trace.records[0]
    assert trace[1:] == trace.records[1:]
    assert [r.label for r in trace] == ["[0]", "sin", "result['y']"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        trace[0].rms = 1.0
    assert repr(trace) == "ScaleTrace(3 values)"


def test_table(trace) -> None:
    console = Console(width=200, file=io.StringIO())
    console.print(trace.table())
    text = console.file.getvalue()
    assert "ScaleTrace(3 values)" in text
    assert "zero/subn./sat." in text
    row = next(line for line in text.splitlines() if "result['y']" in line)
    assert "forward" in row
    assert "float32[4]" in row
    assert "2.52" in row
    assert "mul" in row
    assert len([line for line in text.splitlines() if "float32[4]" in line]) == 3


def test_plot_names_each(trace) -> None:
    (axes,) = trace.plot().axes
    assert [t.get_text() for t in axes.get_xticklabels()] == ["[0]", "sin", "result['y']"]

import sys

import jax.numpy as jnp
import pytest

from unitscale.analysis import trace_scales


def test_a_missing_dependency_says_how_to_get_it(monkeypatch) -> None:
    trace = trace_scales(jnp.sin)(1.0)
    for name in ("matplotlib.figure", "matplotlib", "rich.table", "rich"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"plot: needs matplotlib.*unitscale\[recipes\]"):
        trace.plot()
    with pytest.raises(ImportError, match=r"table: needs rich.*unitscale\[recipes\]"):
        trace.table()

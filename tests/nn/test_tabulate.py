"""Layers hand on the options that were given, so that Flax can show what they are called with."""

import pytest
from flax import nnx

from tests.nn.table import make


@pytest.mark.parametrize("name", ["lora", "layer"])
def test_a_table_of_a_model(name) -> None:
    """Flax's, which shows the arguments of every layer, ScaledArrays among them."""
    model, layer = make(name, "bfloat16")
    calls = {type(one): type(one).__call__ for _, one in nnx.iter_modules(model)}
    table = nnx.tabulate(model, layer.input(), console_kwargs={"width": 200})
    for path, _ in nnx.iter_modules(model):
        assert "/".join(map(str, path)) in table
    assert all(kind.__call__ is call for kind, call in calls.items())

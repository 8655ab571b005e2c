"""What a training step sends on a mesh is read from its program."""

from collections.abc import Callable

import pytest

from recipes.bench import _mesh_steps
from recipes.gpt.config import GPTConfig


def test_a_batch_that_is_divided_exchanges_gradients_alone(
    make_config: Callable[..., GPTConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_mesh_steps, "h200_available", lambda: False)
    monkeypatch.setattr(_mesh_steps, "MESHES", ({"data": 8}, {"context": 8}))
    config = make_config("data.batch_size=8", "model.dropout=0.0")
    by_batch, by_context = _mesh_steps.mesh_steps(config).rows
    assert (by_batch["mesh"], by_batch["all-reduces"] > 0) == ("data 8", True)
    assert by_batch["all-gathers"] == by_batch["all-to-alls"] == 0
    assert by_context["all-gathers"] > 0  # of keys and values
    assert by_context["MiB sent"] > by_batch["MiB sent"] > 0
    assert by_batch["of it in 8 bits"] == 0

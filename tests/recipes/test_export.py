"""Exporting trained models to safetensors files."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from flax import nnx

from recipes.errors import RecipeError
from recipes.run.folder import open_run
from recipes.trained import export, save_tensors
from unitscale import ScaledArray, nn

from .conftest import MakeConfig
from .runs import untrained


def entries(path: Path) -> dict[str, Any]:
    return dict(safetensors.deserialize(path.read_bytes()))


def test_a_run(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    state = untrained(config, open_run(config))
    path = tmp_path / "new" / "model.safetensors"
    assert export(config, path, pytest.fail).endswith(f"arrays of tiny are in {path}")
    (tmp_path / "own").touch()  # by the umask
    assert path.stat().st_mode == (tmp_path / "own").stat().st_mode
    kernel = state.params["layers"][0]["mlp"]["up"]["kernel"].get_value()
    found = entries(path)["layers.0.mlp.up.kernel"]
    assert (found["dtype"], found["shape"]) == ("F32", list(kernel.shape))
    assert found["data"] == np.asarray(kernel).tobytes()
    for wrong in (path, tmp_path / "precious.txt"):
        with pytest.raises(RecipeError, match=rf"OUTPUT: expected a new file .*got {wrong}"):
            export(config, wrong, pytest.fail)
    with pytest.raises(RecipeError, match="no run at"):
        export(make_config("name=other"), tmp_path / "a.safetensors", pytest.fail)


def test_types_and_vocabularies_without_padding(tmp_path: Path) -> None:
    types = {"bfloat16": "BF16", "float16": "F16", "float8_e5m2": "F8_E5M2"}
    values = {dtype: jnp.asarray([1.0, -0.5, 0.0], dtype) for dtype in types}
    box = nnx.Dict({dtype: nnx.Param(value) for dtype, value in values.items()})
    box.n = nnx.Variable(jnp.arange(3))
    box.table = nn.Embed(5, 3, pad_to_multiple_of=8, rngs=nnx.Rngs(0))
    box.layer = nn.Dense(3, 3, policy="fp8_delayed", use_bias=False, rngs=nnx.Rngs(0))
    box.readout = nn.Readout(3, 5, pad_to_multiple_of=8, rngs=nnx.Rngs(0))
    value = box.readout.kernel.get_value()
    box.readout.kernel.set_value(ScaledArray(value / 4, jnp.float32(4)))
    assert save_tensors(box, tmp_path / "x") == 7  # without the amax state of `layer`
    found = entries(tmp_path / "x")
    for dtype, name in types.items():
        assert found[dtype]["dtype"] == name
        assert found[dtype]["data"] == np.asarray(values[dtype]).tobytes()
    assert found["n"]["dtype"] == "I32"
    assert found["table.embedding"]["shape"] == [5, 3]
    assert found["readout.kernel"]["shape"] == [3, 5]
    assert found["readout.kernel"]["data"] == np.asarray(value[:, :5]).tobytes()


def test_what_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match=r"cannot write .*: Is a directory; give a path"):
        save_tensors(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tmp_path)
    full = safetensors.SafetensorError("no space")
    monkeypatch.setattr("safetensors.numpy.save_file", Mock(side_effect=full))
    with pytest.raises(RecipeError, match=r"cannot write .*: no space; give a path"):
        save_tensors(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), tmp_path / "x")
    assert not list(tmp_path.iterdir())

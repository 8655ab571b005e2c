"""Models in safetensors files: what is in them, and that they come back."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.errors import RecipeError
from recipes.hf.export import load_tensors, save_tensors
from unitscale import nn
from unitscale.quant import convert, to_static

WIDTH = 128


def served(seed: int = 0) -> nnx.Sequential:
    rngs = nnx.Rngs(seed)
    up, down = (nnx.Linear(WIDTH, WIDTH, rngs=rngs, use_bias=False) for _ in range(2))
    model = nnx.Sequential(up, jax.nn.relu, down, nnx.Dropout(0.0, rngs=rngs))
    convert(model, "fp8_dynamic")
    to_static(model)
    return model


def header(path: Path) -> dict:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length])


def test_fp8_weights_are_written_as_such(tmp_path: Path) -> None:
    path = tmp_path / "new" / "model.safetensors"
    save_tensors(served(), path)
    entries = header(path)
    kernel = entries["layers.0.kernel"]
    assert (kernel["dtype"], kernel["shape"]) == ("F8_E4M3", [WIDTH, WIDTH])
    assert entries["layers.0.dot_general.weight_scale"]["dtype"] == "F32"
    assert set(entries) == {
        f"layers.{i}.{name}" for i in (0, 2) for name in ("kernel", "dot_general.weight_scale")
    }
    plain = nnx.Sequential(nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0)))
    save_tensors(plain, tmp_path / "plain.safetensors")
    bytes_of_weights = 2 * 4 * WIDTH * WIDTH
    # A quarter, and less than 1 KB of names and scales.
    assert 0 <= path.stat().st_size - bytes_of_weights / 4 < 1024
    assert header(tmp_path / "plain.safetensors")["layers.0.kernel"]["dtype"] == "F32"


@pytest.mark.parametrize("abstract", [False, True])
def test_a_model_comes_back(tmp_path: Path, abstract: bool) -> None:
    model, path = served(), tmp_path / "model.safetensors"
    save_tensors(model, path)
    other = nnx.eval_shape(lambda: served(1)) if abstract else served(1)
    load_tensors(other, path)
    x = jax.random.normal(jax.random.key(2), (4, WIDTH))
    wanted = model.layers[2](jax.nn.relu(model.layers[0](x)))
    np.testing.assert_array_equal(other.layers[2](jax.nn.relu(other.layers[0](x))), wanted)
    assert other.layers[0].kernel.get_value().dtype == jnp.float8_e4m3fn


@pytest.mark.parametrize(
    ("dtype", "name"), [("bfloat16", "BF16"), ("float16", "F16"), ("float8_e5m2", "F8_E5M2")]
)
def test_other_types_come_back(tmp_path: Path, dtype: str, name: str) -> None:
    values = jnp.asarray([1.0, -0.5, 0.0], dtype)
    box, path = nnx.Dict(a=nnx.Param(values), n=nnx.Variable(jnp.arange(3))), tmp_path / "x"
    save_tensors(box, path)
    assert {k: v["dtype"] for k, v in header(path).items()} == {"a": name, "n": "I32"}
    box["a"].set_value(jnp.zeros_like(values))
    load_tensors(box, path)
    np.testing.assert_array_equal(box["a"].get_value(), values)
    assert box["a"].get_value().dtype == dtype


def test_other_models_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_tensors(served(), path)
    plain = nnx.Sequential(nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=nnx.Rngs(0)))
    with pytest.raises(RecipeError, match=r"layers.0.dot_general.weight_scale is not in the model"):
        load_tensors(plain, path)
    save_tensors(plain, path)
    with pytest.raises(RecipeError, match=r"layers.0.dot_general.weight_scale is not in the file"):
        load_tensors(served(), path)
    narrow = nnx.Sequential(nnx.Linear(WIDTH, 16, use_bias=False, rngs=nnx.Rngs(0)))
    with pytest.raises(RecipeError, match=r"layers.0.kernel must be float32\[128, 16\]; got"):
        load_tensors(narrow, path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot read .*absent"):
        load_tensors(served(), tmp_path / "absent")
    (tmp_path / "damaged").write_bytes(b"no tensors")
    with pytest.raises(RecipeError, match=r"cannot read .*damaged"):
        load_tensors(served(), tmp_path / "damaged")
    with pytest.raises(RecipeError, match=r"cannot write .*damaged/x"):
        save_tensors(served(), tmp_path / "damaged" / "x")


def test_what_is_no_array_is_named(tmp_path: Path) -> None:
    layer = nn.Dense(16, 16, policy="fp8_delayed", rngs=nnx.Rngs(0))
    with pytest.raises(RecipeError, match=r"amax holds a QuantState"):
        save_tensors(layer, tmp_path / "x")

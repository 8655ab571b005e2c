"""`bench scales`: values by category, tensors out of range, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from recipes.bench import scales
from recipes.cli import main
from recipes.config import GPTModelConfig
from recipes.gpt.config import GPTConfig
from recipes.gpt import build


@pytest.fixture(scope="module")
def measured():
    """A model and what `measure` says of it."""
    shape = GPTModelConfig(layers=2, width=32, heads=2, vocab=256)
    config = GPTConfig.model_validate({"name": "x", "model": shape.model_dump()})
    tokens = np.random.default_rng(1).integers(0, 256, (2, 9)).astype(np.int32)
    return build(config), tokens, scales.measure(config, tokens)


def test_every_tensor_has_one_category(measured):
    _, _, found = measured
    assert set(found[scales.STREAM]) == {"embed", "stack.layers.0", "stack.layers.1"}
    assert set(found[scales.STREAM_GRADIENT]) == set(found[scales.STREAM])
    assert len(found[scales.DENSE_OUTPUT]) == 2 * 6  # query, key, value, out, up, down
    assert set(found[scales.LOGITS]) == {"readout"}
    assert set(found[scales.WEIGHT]) == set(found[scales.WEIGHT_GRADIENT])


def test_values_are_those_of_the_model(measured):
    model, tokens, found = measured

    def rms(x):
        return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))

    embedded = model.embed(tokens[:, :-1]).data
    # Sums of up to 2,048 squares in float32.
    assert found[scales.STREAM]["embed"] == pytest.approx(rms(embedded), rel=1e-4)
    logits = model(tokens[:, :-1]).data
    assert found[scales.LOGITS]["readout"] == pytest.approx(rms(logits), rel=1e-4)
    kernel = model.readout.kernel.get_value()
    assert found[scales.WEIGHT]["readout.kernel"] == pytest.approx(rms(kernel), rel=1e-4)
    assert jnp.isfinite(jnp.asarray(list(found[scales.WEIGHT_GRADIENT].values()))).all()


def test_what_is_out_of_range_is_named():
    values = {category: {"a.0.b": 1.0} for category in scales.CATEGORIES}
    values[scales.DENSE_OUTPUT] = {"a.0.b": 1.25, "a.1.b": 1.3, "a.2.b": 0.7, "c": 0.8}
    found = [scales.Found("2 x 8", values)]
    (row,) = scales._outside(found).rows
    assert (row["tensor"], row["outside"], row["of"], row["RMS"]) == ("a.*.b", 2, 3, "0.70-1.30")
    by_name = {row["tensors"]: row for row in scales._summary(found).rows}
    assert by_name["Dense outputs"]["within"] is False
    assert by_name["Dense outputs"]["at "] == "2 x 8: a.1.b"
    assert by_name["between blocks"]["within"] is True
    assert "within" not in by_name["weights"]


@pytest.mark.slow
def test_command_measures_every_shape(tmp_path: Path, text_file: Path):
    path = tmp_path / "out.json"
    words = ["--depths", "1,2", "--widths", "32,64", "--batch", "1", "--length", "8"]
    assert main(["bench", "scales", *words, "--data", str(text_file), "--json", str(path)]) == 0
    summary, by_shape, _ = json.loads(path.read_text())["tables"]
    assert [row["layers x width"] for row in by_shape["rows"]] == [
        "1 x 64 random",
        "2 x 64 random",
        "1 x 32 random",
        "2 x 32 random",
        "1 x 64 text",
    ]
    assert {row["tensors"] for row in summary["rows"]} == {c.name for c in scales.CATEGORIES}
    assert all(row["least"] <= row["greatest"] for row in summary["rows"])


def test_command_rejects_shapes_that_are_none(capsys):
    assert main(["bench", "scales", "--depths", "4,x"]) == 2
    assert "--depths: expected positive integers" in capsys.readouterr().err

"""FP8 folders of other libraries: read, kept in FP8 for LoRA, and written."""

import importlib
import json
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from recipes.cli import app
from recipes.config import LoraConfig
from recipes.errors import RecipeError
from recipes.hf import adapt, load, shape_of
from tests.recipes.pretrained import FIXTURES, change_config, change_tensors, copied, reference

E4M3 = jnp.float8_e4m3fn
INT8 = {"num_bits": 8, "type": "int"}
BLOCK = 10  # divides none of the sizes of the fixture
SCHEMES = {
    "block": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "fmt": "e4m3"},
    "channel": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
}


def is_linear(name: str) -> bool:
    return ".layers." in name and name.endswith("proj.weight")


def quantize(weight: np.ndarray, scheme: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return data, scale and value in NumPy; only scales per channel are powers of two."""
    wide = weight.astype(np.float32)
    sizes = {"block": (BLOCK, BLOCK), "channel": (1, wide.shape[1]), "tensor": wide.shape}[scheme]
    pads = [(0, -n % size) for n, size in zip(wide.shape, sizes, strict=True)]
    rows, columns = (n + pad for n, (_, pad) in zip(wide.shape, pads, strict=True))
    split = np.pad(wide, pads).reshape(rows // sizes[0], sizes[0], columns // sizes[1], sizes[1])
    scale = np.abs(split).max((1, 3)) / 448
    scale = np.exp2(np.ceil(np.log2(scale))) if scheme == "channel" else scale
    full = np.repeat(np.repeat(scale, sizes[0], 0), sizes[1], 1)[: wide.shape[0], : wide.shape[1]]
    data = (wide / full).astype(E4M3)
    return data, scale, data.astype(np.float32) * full


def published(tmp_path: Path, scheme: str, without: str = "-") -> tuple[Path, Path]:
    """Make a folder as others publish it, and the same model in float32."""
    folder, plain = (copied("llama3", tmp_path / name) for name in ("fp8", "plain"))
    change_config(folder, quantization_config=SCHEMES[scheme], dtype="float32")

    def change(keep: bool, old: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        new = dict(old)
        for name in filter(is_linear, old):
            data, scale, value = quantize(old[name], scheme)
            new[name] = value
            if keep:
                stem = name.removesuffix("weight")
                part = "weight_scale_inv" if scheme == "block" else "weight_scale"
                shape = () if scheme == "tensor" else scale.shape
                kind = jnp.float8_e8m0fnu if scheme == "channel" else np.float32
                new |= {name: data, stem + part: scale.reshape(shape).astype(kind)}
                new |= dict.fromkeys((f"{stem}input_scale", f"{stem}kv_scale"), np.ones((), "f4"))
        return {name: array for name, array in new.items() if without not in name}

    change_tensors(folder, lambda old: change(True, old))
    change_tensors(plain, lambda old: change(False, old))
    return folder, plain


@pytest.mark.parametrize(
    "scheme", [pytest.param(s, marks=[pytest.mark.slow] * (s != "block")) for s in SCHEMES]
)
def test_published_folders_are_read(scheme: str, tmp_path: Path) -> None:
    folder, plain = published(tmp_path, scheme)
    assert [shape_of(str(x), "lm").variant.fp8 for x in (folder, plain)] == [True, False]
    (ids, *_), _ = reference(FIXTURES / "llama3")
    expected = jax.jit(load(plain).model)(ids)
    found = jax.jit(load(folder).model)(ids)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    kept: Any = load(folder, "lm", keep_fp8=True, lazy=True).model
    adapt(kept, LoraConfig(), frozen="float8_e4m3fn")
    kernel = kept.layers[0].mlp.down.kernel.get_value()
    assert kernel.dtype == E4M3
    np.testing.assert_allclose(jax.jit(kept)(ids), expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_folders_are_written_and_read_again(scheme: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["export", str(FIXTURES / "llama3"), str(out), "--fp8", scheme]
    )
    assert result.exit_code == 0, result.output
    again = load(out)
    assert sum(map(is_linear, again.source.narrow)) == len(again.source.narrow) > 0
    for name, read in again.source.narrow.items():
        value, old = read(), load(FIXTURES / "llama3").source.tensors[name]
        new = np.asarray(value.value)
        assert value.dtype == E4M3
        assert np.all(np.log2(np.asarray(value.scale)) % 1 == 0)
        # E4M3 rounds to 4 significant bits, or to a multiple of 2^-9 times the scale.
        bound = np.maximum(np.abs(old) * 2.0**-4, 2.0**-10 * np.asarray(value.scale).max())
        assert np.all(np.abs(new - old) <= bound), name
    config = json.loads((out / "config.json").read_text("utf-8"))
    wanted = "fp8" if scheme == "block" else "compressed-tensors"
    assert config["quantization_config"]["quant_method"] == wanted


@pytest.mark.parametrize(
    ("scheme", "named"),
    [
        (SCHEMES["block"] | {"quant_method": "gptq"}, r"quant_method.*gptq"),
        ("gptq", r"quant_method.*gptq"),
        (SCHEMES["channel"] | {"config_groups": {"all": {"weights": INT8}}}, "'int'"),
        (SCHEMES["block"] | {"weight_block_size": [5, 5]}, r"q_proj|k_proj|weight"),
    ],
)
def test_unknown_schemes_are_refused(scheme: Any, named: str, tmp_path: Path) -> None:
    folder, _ = published(tmp_path, "block")
    change_config(folder, quantization_config=scheme)
    with pytest.raises(RecipeError, match=named):
        load(folder)


def test_unreadable_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = published(tmp_path, "channel", without="0.mlp.up_proj.weight_scale")
    with pytest.raises(RecipeError, match=r"0\.mlp\.up_proj\.weight"):
        load(folder)
    monkeypatch.setattr("recipes.hf._quantized._SIZE", BLOCK)  # transformers infers other blocks
    for name, wanted in {"gpt2": "gpt2", "llama3": "multiples of 10"}.items():
        command = ["export", str(FIXTURES / name), str(tmp_path / "out"), "--fp8", "block"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code
        assert wanted in str(result.exception or result.output)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:You passed .quantization_config.:UserWarning")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_reads_the_same_weights(scheme: str, tmp_path: Path) -> None:
    names = ("torch", "transformers")
    torch, transformers = (cast(Any, importlib.import_module(name)) for name in names)
    out = tmp_path / "out"
    CliRunner().invoke(app, ["export", str(FIXTURES / "llama3"), str(out), "--fp8", scheme])
    (ids, *_), _ = reference(FIXTURES / "llama3")
    block = scheme == "block"
    make = transformers.FineGrainedFP8Config if block else transformers.CompressedTensorsConfig
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        out, quantization_config=make(dequantize=True), dtype=torch.float32
    )
    for module in theirs.modules():  # inputs are not quantized here
        if hasattr(module, "quantization_enabled"):
            module.quantization_enabled = False
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(ids)).logits.numpy()
    np.testing.assert_allclose(jax.jit(load(out).model)(ids), expected, atol=1e-4)

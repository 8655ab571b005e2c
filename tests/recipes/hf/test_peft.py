"""Adapters in PEFT's files: written, read, added to a folder's weights, and refused."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from recipes.config import LoraConfig
from recipes.errors import RecipeError
from recipes.hf import adapt, load, save_adapter, start_from
from tests.recipes.pretrained import FIXTURES, reference

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
LORA = LoraConfig(rank=2, alpha=6.0, targets=("query", "value"))
GPT2 = LoraConfig(rank=3, alpha=6.0, targets=("query", "key", "value", "out"))
# Differences of float32 sums in another order.
TOLERANCE = 1e-5


def updated(name: str, lora: LoraConfig) -> Any:
    """A model whose updates are drawn: none is zero."""
    model = load(FIXTURES / name, on_host=True).model
    adapt(model, lora)
    draw = np.random.default_rng(0)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        shape = variable.get_value().shape
        variable.set_value(draw.normal(size=shape, scale=0.3).astype(np.float32))
    return model


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter of the queries and values of Llama 3."""
    save_adapter(updated("llama3", LORA), LORA, tmp_path / "adapter", "llama3")
    return tmp_path / "adapter"


def change(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / CONFIG).read_text("utf-8"))
    (folder / CONFIG).write_text(json.dumps(config | keys), "utf-8")


def retensor(
    folder: Path, changed: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]
) -> None:
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    arrays = {name: np.ascontiguousarray(array) for name, array in changed(tensors).items()}
    safetensors.numpy.save_file(arrays, folder / WEIGHTS)


def test_names_and_shapes_are_those_of_peft(adapter: Path) -> None:
    """As PEFT 0.21 wrote them for the same folder, rank and layers."""
    found = {k: v.shape for k, v in safetensors.numpy.load_file(adapter / WEIGHTS).items()}
    layers = "base_model.model.model.layers"
    assert found == {
        f"{layers}.{index}.self_attn.{name}.{part}.weight": shape
        for index in range(2)
        for name, part, shape in (
            ("q_proj", "lora_A", (2, 16)),
            ("q_proj", "lora_B", (24, 2)),
            ("v_proj", "lora_A", (2, 16)),
            ("v_proj", "lora_B", (12, 2)),
        )
    }
    config = json.loads((adapter / CONFIG).read_text("utf-8"))
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert (config["r"], config["lora_alpha"], config["fan_in_fan_out"]) == (2, 6, False)
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert config["base_model_name_or_path"] == "llama3"


def test_names_of_gpt2(tmp_path: Path) -> None:
    """One tensor of query, key and value; the name that the MLP has too is given in full."""
    save_adapter(updated("gpt2", GPT2), GPT2, tmp_path, "gpt2")
    found = {k: v.shape for k, v in safetensors.numpy.load_file(tmp_path / WEIGHTS).items()}
    top = "base_model.model.transformer.h.1.attn"
    assert {key: shape for key, shape in found.items() if key.startswith(top)} == {
        f"{top}.c_attn.lora_A.weight": (3, 16),
        f"{top}.c_attn.lora_B.weight": (48, 3),
        f"{top}.c_proj.lora_A.weight": (3, 16),
        f"{top}.c_proj.lora_B.weight": (16, 3),
    }
    config = json.loads((tmp_path / CONFIG).read_text("utf-8"))
    assert config["fan_in_fan_out"] is True
    assert config["target_modules"] == ["attn.c_proj", "c_attn"]


@pytest.mark.parametrize(("name", "lora"), [("llama3", LORA), ("gpt2", GPT2)])
def test_an_adapter_is_read_back(name: str, lora: LoraConfig, tmp_path: Path) -> None:
    """Into the updates of a new model to the bit, and into its weights by their function."""
    model = updated(name, lora)
    save_adapter(model, lora, tmp_path, name)
    other: Any = load(FIXTURES / name, on_host=True).model
    adapt(other, lora, seed=1)
    start_from(other, lora, tmp_path)
    for left, right in zip(
        *(nnx.to_flat_state(nnx.state(one, nnx.LoRAParam)) for one in (model, other)), strict=True
    ):
        np.testing.assert_array_equal(left[1].get_value(), right[1].get_value())
    (ids, *_), base = reference(FIXTURES / name)
    merged: Any = load(FIXTURES / name, adapter=tmp_path).model
    expected = np.asarray(model(ids))
    assert np.abs(expected - base).max() > 1e3 * TOLERANCE, "the comparison can fail"
    np.testing.assert_allclose(merged(ids), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("rslora", "power"), [(False, 1.0), (True, 0.5)])
def test_weights_with_an_adapter(adapter: Path, rslora: bool, power: float) -> None:
    """W + alpha / rank^power B A, in float64, at ranks that may differ by layer."""
    tensors = safetensors.numpy.load_file(adapter / WEIGHTS)
    tensors[QUERY.format("A")] = np.ones((4, 16), np.float32)
    tensors[QUERY.format("B")] = np.linspace(-1, 1, 96, dtype=np.float32).reshape(24, 4)
    retensor(adapter, lambda _: tensors)
    change(adapter, use_rslora=rslora, rank_pattern={"layers.0.self_attn.q_proj": 4})
    whole, merged = (
        load(FIXTURES / "llama3", adapter=folder).model.layers[0].attention
        for folder in (None, adapter)
    )
    for name, letter, rank in (("query", "q", 4), ("value", "v", 2)):
        b, a = (
            tensors[QUERY.format(part).replace("q_proj", f"{letter}_proj")].astype(np.float64)
            for part in "BA"
        )
        expected = np.asarray(getattr(whole, name).kernel.get_value()) + 6 / rank**power * (b @ a).T
        found = getattr(merged, name).kernel.get_value()
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    np.testing.assert_array_equal(merged.key.kernel.get_value(), whole.key.kernel.get_value())


def without(name: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda old: {key: value for key, value in old.items() if key != name}


def renamed(old: str, new: str) -> Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    return lambda tensors: {k.replace(old, new): value for k, value in tensors.items()}


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


# how an adapter is damaged, and what is said of it
DAMAGED: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: (f / CONFIG).unlink(), rf"got one without {CONFIG}; name the folder that has it"),
    (
        lambda f: (f / "own").mkdir() or (f / CONFIG).rename(f / "own" / CONFIG),
        rf"without {CONFIG}; name the folder that has it such as .*own",
    ),
    (lambda f: (f / CONFIG).write_text("[]"), rf"{CONFIG}: expected a JSON object; got list"),
    (lambda f: (f / WEIGHTS).unlink(), rf"adapter: expected {WEIGHTS}; got no such file; copy"),
    (pickled, rf"expected {WEIGHTS}; got the pickle file adapter_model\.bin, .*is not read; conv"),
    (lambda f: (f / WEIGHTS).write_bytes(b"x"), rf"{WEIGHTS}: expected a safetensors file"),
    (lambda f: change(f, peft_type="IA3"), rf"{CONFIG}: peft_type: expected 'LORA'; got 'IA3'"),
    (lambda f: change(f, use_dora=True), rf"{CONFIG}: use_dora: expected no key that is not known"),
    (lambda f: change(f, modules_to_save=["lm_head"]), r"modules_to_save: expected no key"),
    (lambda f: change(f, alpha_pattern={"q_proj": 3}), r"alpha_pattern: expected .*at most 0 item"),
    (lambda f: change(f, init_lora_weights="pissa"), r"init_lora_weights.*: expected .*'gaussian'"),
    (lambda f: change(f, r=4), r"q_proj with lora_A \[4, 16\] and lora_B \[24, 4\], .*\[2, 16\]"),
    (
        lambda f: retensor(f, renamed("q_proj", "qkv_proj")),
        r"expected lora_A and lora_B of linear layers .*self_attn\.q_proj; got .*qkv_proj",
    ),
    (lambda f: retensor(f, renamed("layers.1.", "layers.7.")), r"got .*layers\.7\..*of this model"),
    (
        lambda f: retensor(f, renamed("v_proj", "o_proj")),
        r"o_proj with lora_A \[2, 24\] and lora_B",
    ),
    (
        lambda f: retensor(f, without(QUERY.format("A"))),
        r"lora_A and lora_B of model\.layers\.0\.self_attn\.q_proj; got lora_B alone",
    ),
]


@pytest.fixture(scope="module")
def llama() -> Any:
    return updated("llama3", LORA)


@pytest.mark.parametrize(
    ("damage", "message"), DAMAGED, ids=[message[:40] for _, message in DAMAGED]
)
def test_damaged_adapters(damage: Any, message: str, llama: Any, adapter: Path) -> None:
    damage(adapter)
    with pytest.raises(RecipeError, match=message) as caught:
        start_from(llama, LORA, adapter)
    assert str(adapter) in str(caught.value)


# another config than the adapter's, and what is said of it
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"rank": 4, "alpha": 12.0}, r"lora\.rank: expected 2, that of .*; got 4; set lora\.rank=2"),
    ({"alpha": 2.0}, r"lora\.alpha: expected 6, that of .*; got 2; set lora\.alpha=6"),
    ({"targets": ("query",)}, r"lora\.targets: expected those of .*got query, and .*v_proj in"),
    ({"targets": ("query", "value", "key")}, r"got query, value, key, and no .*k_proj in"),
]


@pytest.mark.parametrize(("settings", "message"), OTHERS, ids=lambda value: str(value)[:40])
def test_adapters_of_other_configs(
    settings: dict[str, Any], message: str, llama: Any, adapter: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        start_from(llama, LORA.model_copy(update=settings), adapter)


def test_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"expected the folder .*got nothing; name .*{CONFIG}"):
        load(FIXTURES / "gpt2", adapter=tmp_path / "nowhere")
    with pytest.raises(RecipeError, match="expected a decoder, which an adapter is for; got bert"):
        load(FIXTURES / "bert-mlm", adapter=tmp_path)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(("name", "lora"), [("llama3", LORA), ("gpt2", GPT2)])
def test_peft_reads_and_writes_the_same(name: str, lora: LoraConfig, tmp_path: Path) -> None:
    """The logits of PEFT with an adapter from here, and those from here with one of PEFT's."""
    names = ("peft", "torch", "transformers")
    peft, torch, transformers = (cast(Any, importlib.import_module(x)) for x in names)
    (ids, *_), _ = reference(FIXTURES / name)
    model = updated(name, lora)
    save_adapter(model, lora, tmp_path / "ours", name)

    def logits(wrap: Callable[[Any], Any]) -> tuple[Any, np.ndarray]:
        base = transformers.AutoModelForCausalLM.from_pretrained(FIXTURES / name)
        wrapped = wrap(base.float()).eval()
        with torch.no_grad():
            return wrapped, wrapped(torch.tensor(ids)).logits.numpy()

    _, found = logits(lambda base: peft.PeftModel.from_pretrained(base, tmp_path / "ours"))
    np.testing.assert_allclose(found, model(ids), atol=TOLERANCE, rtol=0)
    modules = ["c_attn", "c_proj"] if name == "gpt2" else ["k_proj", "down_proj"]
    config = peft.LoraConfig(
        r=5,
        lora_alpha=3,
        target_modules=modules,
        init_lora_weights=False,
        use_rslora=True,
        fan_in_fan_out=name == "gpt2",
    )
    theirs, expected = logits(lambda base: peft.get_peft_model(base, config))
    theirs.save_pretrained(tmp_path / "theirs")
    merged: Any = load(FIXTURES / name, adapter=tmp_path / "theirs").model
    np.testing.assert_allclose(merged(ids), expected, atol=TOLERANCE, rtol=0)

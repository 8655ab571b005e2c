"""Low-rank updates of imported decoders: training, FP8 bases, and adapters in PEFT's files."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from recipes.config import LoraConfig
from recipes.errors import RecipeError
from recipes.hf import Frozen, adapt, load, save_adapter, start_from
from tests.recipes.pretrained import FIXTURES, reference

IDS = np.arange(3, 11)[None]
ATTENTION = ("query", "key", "value")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
LORA = LoraConfig(rank=2, alpha=6.0, targets=("query", "value"))
GPT2 = LoraConfig(rank=3, alpha=6.0, targets=("query", "key", "value", "out"))
# Differences of float32 sums in another order.
TOLERANCE = 1e-5


def adapted(name: str, dtype: Any = jnp.float32, **settings: Any) -> Any:
    """A model of a folder as the recipe loads it, with an update of its attention."""
    model = load(FIXTURES / name, dtype=dtype, on_host=True).model
    adapt(model, LoraConfig.model_validate({"rank": 2, "targets": ATTENTION} | settings))
    return model


def by_path(model: Any, kind: type) -> dict[str, Any]:
    flat = nnx.to_flat_state(nnx.state(model, kind))
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in flat}


@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_the_first_function_is_that_of_the_folder(name: str) -> None:
    """To the bit, also where frozen matrices are in the type that products are computed in."""
    base = load(FIXTURES / name, dtype=jnp.bfloat16).model
    model = adapted(name, jnp.bfloat16)
    np.testing.assert_array_equal(model(IDS), base(IDS))
    frozen = by_path(model, Frozen)
    assert {value.dtype.name for value in frozen.values() if value.ndim > 1} == {"bfloat16"}
    assert {value.dtype.name for value in frozen.values() if value.ndim == 1} == {"float32"}


def test_updates_alone_are_parameters() -> None:
    """Llama's products have two matrices each; those of GPT-2's one tensor share the first."""
    shapes = {
        "llama3": {"query": [(16, 2), (2, 24)], "key": [(16, 2), (2, 12)]},
        "gpt2": {"query": [(2, 16)], "key": [(16, 2), (2, 16)]},
    }
    for name, expected in shapes.items():
        params = by_path(adapted(name), nnx.Param)
        assert len(params) == 2 * (4 if name == "gpt2" else 6)
        for layer, wanted in expected.items():
            found = [v.shape for k, v in params.items() if f"layers.1.attention.{layer}." in k]
            assert found == wanted
        assert all((value == 0).all() == key.endswith("_b") for key, value in params.items())
    gpt2 = adapted("gpt2").layers[0].attention
    assert gpt2.query.lora_a is gpt2.value.lora_a


def test_an_update_is_added() -> None:
    """x (W + alpha / rank a b) + bias, in float64, and its gradients."""
    layer = adapted("llama3", alpha=6.0).layers[0].attention.key
    draw = np.random.default_rng(0)
    x, b, dy = (draw.normal(size=shape) for shape in ((5, 16), (2, 12), (5, 12)))
    layer.lora_b.set_value(jnp.asarray(b, jnp.float32))
    graphdef, params, rest = nnx.split(layer, nnx.Param, ...)

    def run(params, x):
        return nnx.merge(graphdef, params, rest)(x)

    y, pull = jax.vjp(run, params, jnp.asarray(x, jnp.float32))
    grads, dx = pull(jnp.asarray(dy, jnp.float32))
    w, a = (np.asarray(p.get_value(), np.float64) for p in (layer.kernel, layer.lora_a))
    bias = np.asarray(layer.base.bias.get_value(), np.float64)
    np.testing.assert_allclose(y, x @ (w + 3 * a @ b) + bias, atol=1e-5)
    np.testing.assert_allclose(dx, dy @ (w + 3 * a @ b).T, atol=1e-5)
    np.testing.assert_allclose(grads["lora_a"].get_value(), 3 * x.T @ dy @ b.T, atol=1e-4)
    np.testing.assert_allclose(grads["lora_b"].get_value(), 3 * (x @ a).T @ dy, atol=1e-4)


@pytest.mark.parametrize(("base", "bits"), [("float8_e4m3fn", 4), ("float8_e5m2", 3)])
def test_a_base_in_fp8(base: str, bits: int) -> None:
    """One byte a weight, a power of two an output, and each weight rounded to the format.

    A product is that of the rounded weights, and the backward pass is given no wide copy of them.
    """
    whole, model = load(FIXTURES / "llama3").model, adapted("llama3", base=base)
    for name in ("gate", "down"):
        exact = np.asarray(getattr(whole.layers[1].mlp, name).kernel.get_value(), np.float64)
        kernel = getattr(model.layers[1].mlp, name).kernel.get_value()
        assert (kernel.data.dtype, kernel.scale.shape) == (base, (1, exact.shape[1]))
        assert (np.frexp(kernel.scale)[0] == 0.5).all()
        # Relative to a normal number; a subnormal one's error is that of the least normal one.
        least = float(jnp.finfo(base).smallest_normal) * np.asarray(kernel.scale, np.float64)
        error = np.abs(np.asarray(kernel.value, np.float64) - exact)
        assert (error <= 2.0**-bits * np.maximum(np.abs(exact), least)).all()
        assert error.max() > 0
    assert by_path(model, Frozen)["embed.embedding"].dtype == jnp.float32
    layer = model.layers[0].attention.out
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 24)), jnp.float32)
    y, pull = jax.vjp(layer, x)
    kernel = np.asarray(layer.kernel.get_value().value, np.float64)
    bias = np.asarray(layer.bias.get_value(), np.float64)
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ kernel + bias, atol=1e-5)
    (dx,) = pull(jnp.ones_like(y))
    np.testing.assert_allclose(dx, np.ones(y.shape) @ kernel.T, atol=1e-5)
    saved = {leaf.dtype.name for leaf in jax.tree.leaves(pull) if leaf.shape == kernel.shape}
    assert saved == {base}


def test_nothing_is_drawn_for_a_model_on_the_host() -> None:
    model = load(FIXTURES / "gpt2", dropout=0.5, on_host=True).model
    assert all(isinstance(value, np.ndarray) for value in by_path(model, nnx.Param).values())
    drawn = load(FIXTURES / "gpt2", dropout=0.5).model
    keys = [jax.tree.leaves(nnx.state(one, nnx.RngState)) for one in (model, drawn)]
    assert len(keys[0]) == len(keys[1]) > 2
    for one, other in zip(*keys, strict=True):
        assert (one == other).all()


REFUSED = [
    ("gpt2", ("query", "value"), r"all of query, key, value or none, as transformer\.h\.0\.attn"),
    ("gpt2", ("gate",), r"some of down, key, out, query, up, value, .*got gate; remove gate"),
]


@pytest.mark.parametrize(("name", "targets", "message"), REFUSED)
def test_layers_that_are_not_there(name: str, targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        adapted(name, targets=targets)


def updated(name: str, lora: LoraConfig) -> Any:
    """A model whose updates are drawn: none is zero."""
    model = load(FIXTURES / name, on_host=True).model
    adapt(model, lora)
    draw = np.random.default_rng(0)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        shape = variable.get_value().shape
        variable.set_value(draw.normal(size=shape, scale=0.3).astype(np.float32))
    return model


@pytest.fixture(scope="module")
def llama() -> Any:
    return updated("llama3", LORA)


@pytest.fixture
def adapter(llama: Any, tmp_path: Path) -> Path:
    """An adapter of the queries and values of Llama 3."""
    save_adapter(llama, LORA, tmp_path / "adapter", "llama3")
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


def test_files_are_those_of_peft(adapter: Path, tmp_path: Path) -> None:
    """Names and shapes as PEFT 0.21 wrote them for the same folder, rank and layers.

    GPT-2 has one tensor of query, key and value.
    """
    save_adapter(updated("gpt2", GPT2), GPT2, tmp_path / "gpt2", "gpt2")
    tensors = {"q_proj": ((2, 16), (24, 2)), "v_proj": ((2, 16), (12, 2))}
    fused = {"c_attn": ((3, 16), (48, 3)), "c_proj": ((3, 16), (16, 3))}
    for folder, top, names, rank in (
        (adapter, "model.layers.{}.self_attn", tensors, 2),
        (tmp_path / "gpt2", "transformer.h.{}.attn", fused, 3),
    ):
        found = {k: v.shape for k, v in safetensors.numpy.load_file(folder / WEIGHTS).items()}
        assert found == {
            f"base_model.model.{top.format(index)}.{name}.lora_{part}.weight": shape
            for index in range(2)
            for name, shapes in names.items()
            for part, shape in zip("AB", shapes, strict=True)
        }
        config = json.loads((folder / CONFIG).read_text("utf-8"))
        assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
        assert (config["r"], config["lora_alpha"]) == (rank, 6)
        assert config["fan_in_fan_out"] == (rank == 3)
        assert config["target_modules"] == [f"{top.split('.')[-1]}.{name}" for name in names]
        assert config["base_model_name_or_path"] in ("llama3", "gpt2")


@pytest.mark.parametrize(
    ("name", "lora"), [pytest.param("llama3", LORA, marks=pytest.mark.slow), ("gpt2", GPT2)]
)
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


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return lambda f: retensor(f, lambda was: {k.replace(old, new): v for k, v in was.items()})


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


# how an adapter is damaged, and what is said of it
DAMAGED: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: (f / CONFIG).unlink(), rf"got one without {CONFIG}; give the folder that has it"),
    (lambda f: (f / CONFIG).write_text("[]"), rf"{CONFIG}: expected a JSON object; got list"),
    (lambda f: (f / WEIGHTS).unlink(), rf"adapter: expected {WEIGHTS}; got no such file; copy"),
    (pickled, rf"expected {WEIGHTS}; got the pickle file adapter_model\.bin, .*is not read"),
    (lambda f: (f / WEIGHTS).write_bytes(b"x"), rf"{WEIGHTS}: expected a safetensors file"),
    (lambda f: change(f, peft_type="IA3"), rf"{CONFIG}: peft_type: expected 'LORA'; got 'IA3'"),
    (lambda f: change(f, use_dora=True), rf"{CONFIG}: use_dora: expected no key that is not known"),
    (lambda f: change(f, alpha_pattern={"q_proj": 3}), r"alpha_pattern: expected .*at most 0 item"),
    (lambda f: change(f, init_lora_weights="pissa"), r"init_lora_weights.*: expected .*'gaussian'"),
    (lambda f: change(f, r=4), r"q_proj with lora_A \[4, 16\] and lora_B \[24, 4\], .*\[2, 16\]"),
    (renamed("q_proj", "qkv_proj"), r"linear layers .*self_attn\.q_proj; got .*qkv_proj"),
    (renamed("layers.1.", "layers.7."), r"got .*layers\.7\..*of this model"),
    (renamed("v_proj", "o_proj"), r"o_proj with lora_A \[2, 24\] and lora_B"),
    (
        lambda f: retensor(f, lambda old: {k: v for k, v in old.items() if k != QUERY.format("A")}),
        r"lora_A and lora_B of model\.layers\.0\.self_attn\.q_proj; got lora_B alone",
    ),
]
# another config than the adapter's, and what is said of it
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"rank": 4, "alpha": 12.0}, r"lora\.rank: expected 2, that of .*; got 4; set lora\.rank=2"),
    ({"alpha": 2.0}, r"lora\.alpha: expected 6, that of .*; got 2; set lora\.alpha=6"),
    ({"targets": ("query",)}, r"lora\.targets: expected those of .*got query, and .*v_proj in"),
    ({"targets": ("query", "value", "key")}, r"got query, value, key, and no .*k_proj in"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED)
def test_damaged_adapters(damage: Any, message: str, llama: Any, adapter: Path) -> None:
    damage(adapter)
    with pytest.raises(RecipeError, match=message) as caught:
        start_from(llama, LORA, adapter)
    assert str(adapter) in str(caught.value)


@pytest.mark.parametrize(("settings", "message"), OTHERS)
def test_adapters_of_other_configs(
    settings: dict[str, Any], message: str, llama: Any, adapter: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        start_from(llama, LORA.model_copy(update=settings), adapter)


def test_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"expected the folder .*with {CONFIG}; got nothing"):
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

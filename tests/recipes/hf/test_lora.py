"""Imported decoders on the command line; LoRA with FP8 base weights, and adapters of PEFT."""

import functools
import importlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from recipes.cli import main
from recipes.config import LoraConfig
from recipes.errors import RecipeError
from recipes.hf import Frozen, adapt, chat_prompt, load, save_adapter, start_from, updated_tensors
from recipes.registry import CONFIGS, load_config
from recipes.run.state import load_trained
from recipes.text import SubwordTokenizer

from ..conftest import TEXT
from ..pretrained import FIXTURES, change_config, change_tensors, copied, one_layer, reference

Captured = pytest.CaptureFixture[str]
SHIPPED = Path(__file__).parents[3] / "configs" / "gpt2" / "finetune.yaml"
FOLDER = FIXTURES / "gpt2"
EMBED = "transformer.wte.weight"


def words(folder: Path, init: Path = FOLDER) -> list[str]:
    """Load configs/gpt2/finetune.yaml with a small text, two steps and the given folder."""
    (folder / "text.txt").write_text(TEXT, "utf-8")
    return [
        str(SHIPPED),
        f"init={init}",
        f"data.path={folder / 'text.txt'}",
        "data.sequence_length=8",
        "data.batch_size=2",
        f"train.runs_dir={folder / 'runs'}",
        "train.steps=2",
        "train.log_every=1",
        "train.sample_tokens=0",
        "optimizer.warmup_steps=0",
        "optimizer.name=sgd",  # half the program of adam
        "optimizer.b1=0.0",
        "optimizer.learning_rate=1.0",
    ]


def test_generation_from_a_folder(tmp_path: Path, capsys: Captured) -> None:
    init = one_layer(copied("gpt2", tmp_path))
    command = ["generate", str(init), "--prompt", "The scale", "--tokens", "6"]
    assert main([*command, "--temperature", "0"]) == 0
    text = capsys.readouterr().out.removesuffix("\n")
    tokenizer = SubwordTokenizer.read(init / "tokenizer.json")
    prompt, ids = (tokenizer.encode(words) for words in ("The scale", text))
    logits = nnx.jit(lambda model, ids: model(ids))(load(init).model, ids[None])
    assert ids.size == prompt.size + 6
    likeliest = np.argmax(logits[0], axis=-1)
    np.testing.assert_array_equal(ids[prompt.size :], likeliest[prompt.size - 1 : -1])


def test_a_name_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def snapshot_download(name: str, **options: Any) -> str:
        assert name == "org/llama3"
        return str(FIXTURES / "llama3")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    config: Any = load_config(
        CONFIGS / "llama" / "lora.yaml", ["init=org/llama3", "data.sequence_length=16"]
    )
    assert (config.init, config.model.width) == (str(FIXTURES / "llama3"), 16)
    assert main(["export", "org/llama3", str(tmp_path / "out"), "--fp8", "tensor"]) == 0
    assert main(["generate", "org/llama3", "--tokens", "1"]) == 0


def test_the_shape_is_that_of_the_folder() -> None:
    config = load_config(SHIPPED, [f"init={FOLDER}", "data.sequence_length=32"])
    assert config.model == load(FOLDER, dropout=0.1).config
    assert (config.model.width, config.context, config.model.dropout) == (16, 32, 0.1)


# more arguments of train, and what standard error has to name
WRONG = [
    ("init=/nowhere", "recipe gpt, or a Hugging Face folder; got /nowhere"),
    (f"init={FIXTURES / 'bert-mlm'}", "_text; got 'bert'"),
    ("model.width=32", "model.width: expected 16, as in init"),
    ("data.sequence_length=33", "context must be at least data.sequence_length; got 32"),
]


def test_wrong_input(tmp_path: Path, capsys: Captured) -> None:
    def refused(message: str, *arguments: Any) -> None:
        assert main([str(word) for word in arguments]) == 2
        assert message in capsys.readouterr().err

    for word, message in WRONG:
        refused(message, "train", *words(tmp_path), word)
    assert not (tmp_path / "runs").exists()
    refused("override 'seed=1': expected none, as", "generate", FOLDER, "seed=1")
    refused("expected none with --fp8", "export", FOLDER, "x", "--fp8", "tensor", "seed=1")
    refused("expected a task of bert", "generate", FIXTURES / "bert-mlm")
    refused("expected a Hugging Face folder; got", "generate", "gpt/quickstart.yaml", "--chat")
    folder = copied("gpt2", tmp_path)
    change_tensors(folder, lambda old: old | {EMBED: old[EMBED][:299]})
    change_config(folder, vocab_size=299)
    refused(f"at most the 299 ids that {folder} has; got a tokenizer of 300", "generate", folder)
    (folder / "tokenizer.json").unlink()
    refused("tokenizer.json cannot be read", "generate", folder)
    before = (folder / "model.safetensors").read_bytes()
    refused("OUTPUT: expected a new folder; got", "merge", FOLDER, folder, folder)
    assert (folder / "model.safetensors").read_bytes() == before


LORA = SHIPPED.parents[1] / "llama" / "lora.yaml"


@pytest.mark.slow
def test_low_rank_updates(tmp_path: Path, capsys: Captured) -> None:
    init = tmp_path / "fp8"  # whose scales the run keeps
    whole = one_layer(copied("llama3", tmp_path))
    assert main(["export", str(whole), str(init), "--fp8", "tensor"]) == 0
    command = [str(LORA), *words(tmp_path, init)[1:], "lora.rank=2"]
    assert main(["train", *command]) == 0
    adapter = tmp_path / "runs" / "llama-lora" / "adapter"
    printed = capsys.readouterr().out
    assert f"the adapter (PEFT format) is in {adapter}" in printed
    assert "llama-lora: 136 parameters" in printed  # 16 x 2 + 2 x 24, and 16 x 2 + 2 x 12
    config = load_config(command[0], command[1:])
    graphdef, state = load_trained(config, pytest.fail)
    model = nnx.merge(graphdef, state.params, state.rest)
    tensors = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    layer = model.layers[0].attention.value
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"
    np.testing.assert_array_equal(tensors[name].T, layer.lora_b.get_value())
    assert np.abs(tensors[name]).max() > 0
    question = ["--adapter", str(adapter), "--prompt", "line", "--tokens", "2"]
    assert main(["generate", str(init), *question]) == 0
    assert capsys.readouterr().out.startswith("line")


@pytest.mark.slow
def test_an_adapter_is_added(tmp_path: Path, capsys: Captured) -> None:
    init, lora = str(FOLDER), LoraConfig(rank=2, targets=("down",))
    adapter, merged = (str(tmp_path / name) for name in ("adapter", "merged"))
    model: Any = load(init).model
    adapt(model, lora)
    down = model.layers[0].mlp.down
    down.lora_b.set_value(down.lora_b.get_value() + 1)
    save_adapter(model, lora, tmp_path / "adapter", init)
    assert main(["merge", init, adapter, merged]) == 0
    assert capsys.readouterr().out == f"the model is in {merged}\n"
    chex.assert_trees_all_equal(load(merged).params, load(init, adapter=adapter).params)
    assert main(["generate", str(LORA), "--adapter", adapter]) == 2
    assert "--adapter: expected a Hugging Face folder; got" in capsys.readouterr().err


TEMPLATE = """{{ bos_token }}{% for message in messages %}
<|{{ message['role'] }}|>{{ message['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""
LAID_OUT = "<s><|user|>How?</s>\n<|assistant|>\n"


def folder(path: Path, **tokens) -> Path:
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}} | tokens
    (path / "tokenizer_config.json").write_text(json.dumps(tokens), "utf-8")
    return path


def test_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat_prompt(str(folder(tmp_path, chat_template=TEMPLATE)), " How? ") == LAID_OUT
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!", "utf-8")
    assert chat_prompt(str(tmp_path), "How?") == "How?!"
    (tmp_path / "chat_template.jinja").unlink()
    # a template, or none, and what the message has to name
    for template, message in (
        ("{{ raise_exception('no system') }}", "no system"),
        ("{% if %}", "Expected an expression"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute"),
        (None, r"chat_template\.jinja, or chat_template in tokenizer_config\.json"),
    ):
        with pytest.raises(RecipeError, match=message):
            chat_prompt(str(folder(tmp_path, chat_template=template)), "How?")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(RecipeError, match=r"needs jinja2"):
        chat_prompt(str(tmp_path), "How?")


@pytest.mark.slow
def test_an_answer(tmp_path: Path, capsys: Captured) -> None:
    """`--chat` prints only the answer, the same as for the formatted prompt."""
    chat = folder(copied("llama3", tmp_path), chat_template=TEMPLATE)
    options = ["--tokens", "4", "--temperature", "0"]
    assert main(["generate", str(chat), "--chat", "--prompt", "How?", *options]) == 0
    answer = capsys.readouterr().out
    assert main(["generate", str(chat), "--prompt", LAID_OUT, *options]) == 0
    assert capsys.readouterr().out == LAID_OUT + answer


IDS = np.arange(3, 11)[None]
ATTENTION: Any = ("query", "key", "value")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
LORAS = {
    "llama3": LoraConfig(rank=2, alpha=6.0, targets=("query", "value")),
    "gpt2": LoraConfig(rank=3, alpha=6.0, targets=(*ATTENTION, "out")),
}
# Differences of float32 sums in another order.
TOLERANCE = 1e-5


run = nnx.jit(lambda model, *inputs: model(*inputs))


@functools.cache
def adapted(name: str, dtype: Any = jnp.float32, base: str | None = None) -> Any:
    """Load the model of a folder with updates of its attention, as the recipe does."""
    model: Any = load(FIXTURES / name, dtype=dtype, lazy=True).model
    adapt(model, LoraConfig.model_validate({"rank": 2, "targets": ATTENTION}), frozen=base)
    return model


def by_path(model: Any, kind: type) -> dict[str, Any]:
    flat = nnx.to_flat_state(nnx.state(model, kind))
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in flat}


@pytest.mark.parametrize("name", ["llama3", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_the_first_function_is_that_of_the_folder(name: str) -> None:
    """Results are equal bit for bit, also with frozen matrices in the dtype of matmuls."""
    base: Any = load(FIXTURES / name, dtype=jnp.bfloat16).model
    model = adapted(name, jnp.bfloat16)
    np.testing.assert_array_equal(run(model, IDS), run(base, IDS))
    assert len(by_path(model, nnx.Param)) == 2 * (4 if name == "gpt2" else 6)
    frozen = by_path(model, Frozen)
    assert {value.dtype.name for value in frozen.values() if value.ndim > 1} == {"bfloat16"}
    assert {value.dtype.name for value in frozen.values() if value.ndim == 1} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "bits"),
    [("float8_e4m3fn", 4), ("float8_e5m2", 3)],
)
def test_a_base_in_fp8(base: str, bits: int) -> None:
    """FP8 base weights take one byte, have power-of-two scales per output, and are rounded.

    Matmuls use the rounded weights, and the backward pass keeps no wide copy of them.
    """
    whole: Any = load(FIXTURES / "llama3").model
    layer, exact = (m.layers[0].attention.out for m in (adapted("llama3", base=base), whole))
    exact, kernel = np.asarray(exact.kernel[...], np.float64), layer.kernel.get_value()
    assert (kernel.data.dtype, kernel.scale.shape) == (base, (1, exact.shape[1]))
    assert (np.frexp(kernel.scale)[0] == 0.5).all()
    # Relative to a normal number; a subnormal one's error is that of the least normal one.
    least = float(jnp.finfo(base).smallest_normal) * np.asarray(kernel.scale, np.float64)
    error = np.abs(np.asarray(kernel.value, np.float64) - exact)
    assert (error <= 2.0**-bits * np.maximum(np.abs(exact), least)).all()
    assert error.max() > 0
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 24)), jnp.float32)
    y, pull = jax.vjp(layer, x)
    rounded, bias = (np.asarray(a, np.float64) for a in (kernel.value, layer.bias.get_value()))
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ rounded + bias, atol=1e-5)
    (dx,) = pull(jnp.ones_like(y))
    np.testing.assert_allclose(dx, np.ones(y.shape) @ rounded.T, atol=1e-5)
    saved = {leaf.dtype.name for leaf in jax.tree.leaves(pull) if leaf.shape == rounded.shape}
    assert saved == {base}


@pytest.mark.slow
def test_a_base_in_4_bits() -> None:
    """Rounded to half a step of E2M1 at the scale of each block of 16 inputs."""
    base: Any = load(FIXTURES / "llama3").model
    plain = base.layers[0].attention.out.kernel
    plain[...] = plain[...].at[:, 0].multiply(1e-3)  # an output much smaller than the others
    exact = np.asarray(plain[...], np.float64)
    adapt(base, LORAS["llama3"], frozen="float4_e2m1fn")
    kernel = (layer := base.layers[0].attention.out).kernel.get_value()
    assert (kernel.dtype, kernel.scale.dtype) == (jnp.float4_e2m1fn, jnp.float8_e4m3fn)
    assert kernel.scale.shape == (-(-exact.shape[0] // 16), exact.shape[1])
    unit = float(layer.scale.get_value())
    rounded = unit * np.asarray(kernel.value, np.float64)
    step = unit * np.asarray(kernel.full_scale, np.float64)
    assert (np.abs(rounded - exact) <= np.maximum(np.abs(exact) / 4, step / 4) * 1.001).all()
    blocks = np.maximum.reduceat(np.abs(exact), [0, 16]) / 6  # E4M3 rounds them by up to 1 / 16
    np.testing.assert_allclose(step, np.repeat(blocks, [16, 8], axis=0), rtol=1 / 16)
    x = np.random.default_rng(0).normal(size=(5, 24)).astype(np.float32)
    expected = x @ rounded + np.asarray(layer.bias.get_value())
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, atol=1e-5)


@functools.cache
def updated(name: str) -> Any:
    """Make a model with random updates, none of them zero."""
    model: Any = load(FIXTURES / name, lazy=True).model
    adapt(model, LORAS[name])
    draw = np.random.default_rng(0)
    for _, variable in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        shape = variable.get_value().shape
        variable.set_value(draw.normal(size=shape, scale=0.3).astype(np.float32))
    return model


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Write an adapter of Llama 3's query and value."""
    save_adapter(updated("llama3"), LORAS["llama3"], tmp_path / "adapter", "llama3")
    return tmp_path / "adapter"


def change(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / CONFIG).read_text("utf-8"))
    (folder / CONFIG).write_text(json.dumps(config | keys), "utf-8")


def retensor(folder: Path, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    tensors = safetensors.numpy.load_file(folder / WEIGHTS)
    arrays = {name: np.ascontiguousarray(array) for name, array in changed(tensors).items()}
    safetensors.numpy.save_file(arrays, folder / WEIGHTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama3"])
def test_an_adapter_is_written_and_read_back(name: str, tmp_path: Path) -> None:
    """Reading into a new model's updates is exact; merging into weights gives the same function."""
    model, lora = updated(name), LORAS[name]
    save_adapter(model, lora, tmp_path, f"hub/models--org--{name}/snapshots/0")
    config = json.loads((tmp_path / CONFIG).read_text("utf-8"))
    assert (config["task_type"], config["base_model_name_or_path"]) == ("CAUSAL_LM", f"org/{name}")
    other: Any = load(FIXTURES / name, lazy=True).model
    adapt(other, lora, seed=1)
    start_from(other, lora, tmp_path)
    chex.assert_trees_all_equal(*(nnx.state(one, nnx.LoRAParam) for one in (model, other)))
    (ids, *_), base = reference(FIXTURES / name)
    merged: Any = load(FIXTURES / name, adapter=tmp_path).model
    expected = np.asarray(run(model, ids))
    assert np.abs(expected - base).max() > 1e3 * TOLERANCE, "the comparison can fail"
    np.testing.assert_allclose(run(merged, ids), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("rslora", "power"), [(False, 1.0), (True, 0.5)])
def test_weights_with_an_adapter(adapter: Path, rslora: bool, power: float) -> None:
    """Compare with W + alpha / rank^power B A in float64; ranks may differ by layer."""
    tensors = safetensors.numpy.load_file(adapter / WEIGHTS)
    tensors[QUERY.format("A")] = np.ones((4, 16), np.float32)
    tensors[QUERY.format("B")] = np.linspace(-1, 1, 96, dtype=np.float32).reshape(24, 4)
    retensor(adapter, lambda _: tensors)
    change(adapter, use_rslora=rslora, rank_pattern={"layers.0.self_attn.q_proj": 4})
    models: Any = [load(FIXTURES / "llama3", adapter=folder).model for folder in (None, adapter)]
    whole, merged = (model.layers[0].attention for model in models)
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


def dropped(part: str) -> Callable[[Path], None]:
    return lambda f: retensor(f, lambda was: {k: v for k, v in was.items() if part not in k})


# how an adapter is damaged, and what the message has to name
DAMAGED: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: (f / CONFIG).unlink(), rf"got one without {CONFIG}"),
    (lambda f: (f / WEIGHTS).unlink(), rf"expected {WEIGHTS}; got no such file"),
    (lambda f: change(f, peft_type="IA3"), rf"{CONFIG}: peft_type: .*got 'IA3'"),
    (lambda f: change(f, alpha_pattern={"q_proj": 3}), r"alpha_pattern: .*got {'q_proj': 3}"),
    (lambda f: change(f, init_lora_weights="pissa"), r"init_lora_weights: .*got 'pissa'"),
    (lambda f: change(f, r=4), r"q_proj .*'A': \(16, 4\).* got .*'A': \(16, 2\)"),
    (renamed("q_proj", "qkv_proj"), r"linear layers .*self_attn\.q_proj; got .*qkv_proj"),
    (renamed("v_proj", "o_proj"), r"o_proj .*'A': \(24, 2\)"),
    (dropped(QUERY.format("A")), r"layers\.0\.self_attn\.q_proj .* got {'B'"),
]


def test_damaged_adapters(adapter: Path, tmp_path: Path) -> None:
    for number, (damage, message) in enumerate(DAMAGED):
        damage(folder := Path(shutil.copytree(adapter, tmp_path / str(number))))
        with pytest.raises(RecipeError, match=message) as caught:
            start_from(updated("llama3"), LORAS["llama3"], folder)
        assert str(folder) in str(caught.value)


def test_adapters_of_other_configs(adapter: Path) -> None:
    others: list[dict[str, Any]] = [{"rank": 4, "alpha": 12.0}, {"alpha": 2.0}]
    others += [{"targets": names} for names in (("query",), ("query", "value", "key"))]
    for settings in others:
        lora = LORAS["llama3"].model_copy(update=settings)
        with pytest.raises(RecipeError, match=r"q_proj, v_proj with .*\(2, 6.0\)"):
            start_from(updated("llama3"), lora, adapter)


def test_what_cannot_be_updated(tmp_path: Path) -> None:
    for targets, message in (
        (("query", "value"), r"all of query, key, value or none, .* transformer\.h\.0\.attn"),
        (("gate",), r"some of down, key, out, query, up, value; got gate"),
    ):
        with pytest.raises(RecipeError, match=rf"lora\.targets: expected {message}"):
            updated_tensors(adapted("gpt2").config, LoraConfig.model_validate({"targets": targets}))
    with pytest.raises(RecipeError, match=rf"{CONFIG}; got nothing"):
        load(FIXTURES / "gpt2", adapter=tmp_path / "nowhere")


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", LORAS)
def test_peft_reads_and_writes_the_same(name: str, tmp_path: Path) -> None:
    """PEFT and recipes compute the same logits with adapters that the other one wrote."""
    names = ("peft", "torch", "transformers")
    peft, torch, transformers = (cast(Any, importlib.import_module(x)) for x in names)
    (ids, *_), _ = reference(FIXTURES / name)
    model = updated(name)
    save_adapter(model, LORAS[name], tmp_path / "ours", name)

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

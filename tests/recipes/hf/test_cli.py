"""Decoders from Hugging Face folders on the command line: generate, chat and fine-tune."""

import json
import sys
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from recipes.cli import main
from recipes.config import LoraConfig
from recipes.errors import RecipeError
from recipes.hf import adapt, chat_prompt, load, save_adapter
from recipes.registry import load_config
from recipes.run.state import load_trained
from recipes.text import SubwordTokenizer
from tests.recipes.pretrained import FIXTURES, change_config, change_tensors, copied, one_layer

from ..conftest import TEXT

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


@pytest.mark.slow
def test_tuned_in_fp8(tmp_path: Path, capsys: Captured) -> None:
    init = one_layer(copied("gpt2", tmp_path))
    command = words(tmp_path, init)
    assert main(["train", *command]) == 0
    written = tmp_path / "runs" / "finetune" / "pretrained"
    assert f"the tuned model (Hugging Face format) is in {written}" in capsys.readouterr().out
    assert {file.name for file in written.iterdir()} == {
        file.name for file in init.iterdir() if file.name != "reference.npz"
    }
    (init / "model.safetensors").unlink()  # the checkpoint has the weights from here on
    config = load_config(command[0], command[1:])
    _, state = load_trained(config, pytest.fail)
    tuned, before = load(written), load(FOLDER)
    table = tuned.model.embed.embedding[...]
    np.testing.assert_array_equal(table, state.params["embed"]["embedding"].get_value().value)
    assert np.abs(table - before.model.embed.embedding[...]).max() > 1e-3
    assert main(["generate", *command, "--prompt", "line", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("line")


def test_generation_from_a_folder(tmp_path: Path, capsys: Captured) -> None:
    init = one_layer(copied("gpt2", tmp_path))
    command = ["generate", str(init), "--prompt", "The scale", "--tokens", "6", "--stream"]
    assert main([*command, "--temperature", "0"]) == 0
    text = capsys.readouterr().out.removesuffix("\n")
    tokenizer = SubwordTokenizer.read(init / "tokenizer.json")
    prompt, ids = (tokenizer.encode(words) for words in ("The scale", text))
    logits = nnx.jit(lambda model, ids: model(ids))(load(init).model, ids[None])
    assert ids.size == prompt.size + 6
    likeliest = np.argmax(logits[0], axis=-1)
    np.testing.assert_array_equal(ids[prompt.size :], likeliest[prompt.size - 1 : -1])


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
    ("lora={targets: [querry]}", "expected 'query', 'key', 'value', 'out', 'gate', 'up'"),
    ("precision.frozen=float8_e4m3fn", "precision.frozen needs lora"),
    ("lora={}", "lora.targets: expected all of query, key, value or none, as"),
]


def test_wrong_input(tmp_path: Path, capsys: Captured) -> None:
    def refused(message: str, *arguments: Any) -> None:
        assert main([str(word) for word in arguments]) == 2
        assert message in capsys.readouterr().err

    for word, message in WRONG:
        refused(message, "train", *words(tmp_path), word)
    assert not (tmp_path / "runs").exists()
    refused("override 'seed=1': expected none, as", "generate", FOLDER, "seed=1")
    refused("expected a task of bert", "generate", FIXTURES / "bert-mlm")
    refused("--prompt: expected at least one character", "generate", FOLDER, "--prompt", "")
    refused("--chat: expected a Hugging Face folder", "generate", "gpt/quickstart.yaml", "--chat")
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
    init = one_layer(copied("llama3", tmp_path))
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


def test_an_adapter_is_added(tmp_path: Path, capsys: Captured) -> None:
    init, lora = str(FOLDER), LoraConfig(rank=2, targets=("down",))
    adapter, merged = (str(tmp_path / name) for name in ("adapter", "merged"))
    model: Any = load(init).model
    adapt(model, lora)
    down = model.layers[0].mlp.down
    down.lora_b.set_value(down.lora_b.get_value() + 1)
    save_adapter(model, lora, tmp_path / "adapter", init)
    assert main(["merge", init, adapter, merged]) == 0
    assert capsys.readouterr().out == f"{init} with {adapter} is in {merged}\n"
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

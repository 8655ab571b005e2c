"""Decoders from Hugging Face folders on the command line: generated from, asked, and tuned."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from recipes.cli import main
from recipes.errors import RecipeError
from recipes.hf import chat_prompt, load
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
    """The shipped config with a small text, two steps, and the folder to start from."""
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
    assert f"the tuned model as a Hugging Face folder is in {written}" in capsys.readouterr().out
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


def test_generation_from_a_folder(capsys: Captured) -> None:
    command = ["generate", str(FOLDER), "--prompt", "The scale", "--tokens", "6", "--stream"]
    assert main([*command, "--temperature", "0"]) == 0
    text = capsys.readouterr().out.removesuffix("\n")
    tokenizer = SubwordTokenizer.read(FOLDER / "tokenizer.json")
    prompt, ids = (tokenizer.encode(words) for words in ("The scale", text))
    likeliest = np.argmax(load(FOLDER).model(ids[None])[0], axis=-1)
    assert ids.size == prompt.size + 6
    np.testing.assert_array_equal(ids[prompt.size :], likeliest[prompt.size - 1 : -1])


def test_the_shape_is_that_of_the_folder() -> None:
    config = load_config(SHIPPED, [f"init={FOLDER}", "data.sequence_length=32"])
    assert config.model == load(FOLDER, dropout=0.1).config
    assert (config.model.width, config.context, config.model.dropout) == (16, 32, 0.1)


# more arguments of train or generate, and what standard error has to say
WRONG = [
    (["train", "init=/nowhere"], "recipe gpt, or a Hugging Face folder; got /nowhere; train one"),
    (
        ["train", f"init={FIXTURES / 'bert-mlm'}"],
        "_text; got 'bert'; give the folder of",
    ),
    (["train", "model.width=32"], "model.width: expected 16, that of init"),
    (["train", "data.sequence_length=33"], "context must be at least data.sequence_length; got 32"),
    (
        ["train", "lora={targets: [querry]}"],
        "expected 'query', 'key', 'value', 'out', 'gate', 'up'",
    ),
    (["train", "lora={base: float8_e4m3fn}"], "scalify chooses the formats of all weights; got"),
    (["train", "lora={}"], "lora.targets: expected all of query, key, value or none, as"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_wrong_configs(
    arguments: list[str], message: str, tmp_path: Path, capsys: Captured
) -> None:
    command, *rest = arguments
    assert main([command, *words(tmp_path), *rest]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_wrong_folders(tmp_path: Path, capsys: Captured) -> None:
    assert main(["generate", str(FOLDER), "seed=1"]) == 2
    assert "error: override 'seed=1': expected none, as" in capsys.readouterr().err
    assert main(["generate", str(FIXTURES / "bert-mlm")]) == 2
    assert "expected a task of bert" in capsys.readouterr().err
    folder = copied("gpt2", tmp_path)
    change_tensors(folder, lambda old: old | {EMBED: old[EMBED][:299]})
    change_config(folder, vocab_size=299)
    assert main(["generate", str(folder)]) == 2
    assert f"at most the 299 ids that {folder} has; got a tokenizer of 300" in (
        capsys.readouterr().err
    )
    (folder / "tokenizer.json").unlink()
    assert main(["generate", str(folder)]) == 2
    assert "tokenizer.json cannot be read: No such file or directory; give the tokenizer.json" in (
        capsys.readouterr().err
    )
    assert main(["generate", str(FOLDER), "--prompt", ""]) == 2
    assert "--prompt: expected at least one character" in capsys.readouterr().err


LORA = SHIPPED.parents[1] / "llama" / "lora.yaml"


def test_low_rank_updates(tmp_path: Path, capsys: Captured) -> None:
    """Trained, read from the checkpoint, and added to the folder in memory and in files."""
    init = one_layer(copied("llama3", tmp_path))
    command = [str(LORA), *words(tmp_path, init)[1:], "lora.rank=2"]
    assert main(["train", *command]) == 0
    adapter = tmp_path / "runs" / "llama-lora" / "adapter"
    printed = capsys.readouterr().out
    assert f"the adapter, in files as PEFT has them, is in {adapter}" in printed
    assert "llama-lora: 136 parameters" in printed  # 16 x 2 + 2 x 24, and 16 x 2 + 2 x 12
    config = load_config(command[0], command[1:])
    graphdef, state = load_trained(config, pytest.fail)
    model = nnx.merge(graphdef, state.params, state.rest)
    tensors = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    layer = model.layers[0].attention.value
    name = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"
    np.testing.assert_array_equal(tensors[name].T, layer.lora_b.get_value())
    assert np.abs(tensors[name]).max() > 0
    merged = tmp_path / "merged"
    assert main(["merge", str(init), str(adapter), str(merged)]) == 0
    assert capsys.readouterr().out == f"{init} with {adapter} is in {merged}\n"
    both = load(merged).params, load(init, adapter=adapter).params
    for left, right in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_array_equal(left, right)
    question = ["--adapter", str(adapter), "--prompt", "line", "--tokens", "2"]
    assert main(["generate", str(init), *question]) == 0
    assert capsys.readouterr().out.startswith("line")
    assert main(["generate", *command, "--adapter", str(adapter)]) == 2
    assert "--adapter: expected a Hugging Face folder; got" in capsys.readouterr().err


def test_merge_replaces_no_files(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"kept")
    assert main(["merge", str(FOLDER), str(tmp_path), str(tmp_path)]) == 2
    assert "OUTPUT: expected a new folder; got" in capsys.readouterr().err
    assert (tmp_path / "model.safetensors").read_bytes() == b"kept"


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


def test_templates(tmp_path: Path) -> None:
    for template in (TEMPLATE, [{"name": "default", "template": TEMPLATE}]):
        assert chat_prompt(str(folder(tmp_path, chat_template=template)), " How? ") == LAID_OUT
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!", "utf-8")
    assert chat_prompt(str(tmp_path), "How?") == "How?!"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system') }}", r"one message of a user; got: no system; write"),
        ("{% if %}", r"one message of a user; got: Expected an expression"),
        ("{{ messages.__class__.__mro__ }}", r"one message of a user; got: access to attribute"),
        (None, r"to have chat_template\.jinja, or chat_template in tokenizer_config\.json; got ne"),
    ],
)
def test_templates_that_cannot_be_used(template, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        chat_prompt(str(folder(tmp_path, chat_template=template)), "How?")


def test_an_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer alone, as the same prompt written out has it."""
    chat = folder(copied("llama3", tmp_path), chat_template=TEMPLATE)
    options = ["--tokens", "4", "--temperature", "0"]
    assert main(["generate", str(chat), "--chat", "--prompt", "How?", *options]) == 0
    answer = capsys.readouterr().out
    assert main(["generate", str(chat), "--prompt", LAID_OUT, *options]) == 0
    assert capsys.readouterr().out == LAID_OUT + answer


def test_without_jinja(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(RecipeError, match=r"jinja2 to be installed; it is not; pip install"):
        chat_prompt(str(tmp_path), "How?")


def test_a_run_has_no_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "gpt/quickstart.yaml", "--chat"]) == 2
    assert "--chat: expected a Hugging Face folder; got gpt/quickst" in capsys.readouterr().err

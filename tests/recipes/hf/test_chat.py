"""Prompts laid out by a folder's chat template."""

import json
import sys
from pathlib import Path

import pytest

from recipes.cli import main
from recipes.errors import RecipeError
from recipes.hf import chat_prompt
from tests.recipes.pretrained import copied

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

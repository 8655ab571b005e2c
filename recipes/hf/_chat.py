"""A message as a folder's chat template lays it out."""

import importlib
import json
from pathlib import Path
from typing import Any

from ..errors import RecipeError, read_text

TEMPLATE, TOKENS = "chat_template.jinja", "tokenizer_config.json"


def chat_prompt(folder: str, message: str) -> str:
    """The text that asks the model of a folder to answer a message.

    The template is rendered in Jinja's sandbox, where it cannot reach anything outside.

    Raises:
      RecipeError: The folder has no template, it cannot be rendered, or jinja2 is not installed.
    """
    path = Path(folder)
    try:
        jinja: Any = importlib.import_module("jinja2")  # optional
        sandbox: Any = importlib.import_module("jinja2.sandbox")
    except ModuleNotFoundError as error:
        raise RecipeError(
            '--chat: expected jinja2 to be installed; it is not; pip install "unitscale[hf]", or '
            "leave out --chat"
        ) from error
    tokens = _tokens(path)
    source = _template(path, tokens)
    special = {name: _text(tokens.get(name)) for name in ("bos_token", "eos_token")}
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    messages = [{"role": "user", "content": message}]
    try:
        return environment.from_string(source).render(
            messages=messages, add_generation_prompt=True, **special
        )
    except jinja.TemplateError as error:
        raise RecipeError(
            f"{path}: expected a chat template that takes one message of a user; got: {error}; "
            "write the prompt out, and leave out --chat"
        ) from error


def _refuse(message: str) -> None:
    """What templates call where they do not take the messages."""
    raise importlib.import_module("jinja2").TemplateError(message)


def _tokens(path: Path) -> dict[str, Any]:
    file = path / TOKENS
    if not file.is_file():
        return {}
    try:
        found = json.loads(read_text(file, "--chat", "copy the whole folder"))
    except ValueError as error:
        raise RecipeError(f"{file}: expected JSON; got {error}; copy the file again") from error
    return found if isinstance(found, dict) else {}


def _template(path: Path, tokens: dict[str, Any]) -> str:
    if (path / TEMPLATE).is_file():
        return read_text(path / TEMPLATE, "--chat", "copy the whole folder")
    found = tokens.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = named.get("default")
    if not isinstance(found, str):
        raise RecipeError(
            f"--chat: expected {path} to have {TEMPLATE}, or chat_template in {TOKENS}; got "
            "neither; name the folder of a model that was tuned to chat, or leave out --chat"
        )
    return found


def _text(token: Any) -> str:
    """A special token, which a file has as text or with its properties."""
    return str(token.get("content", "")) if isinstance(token, dict) else token or ""

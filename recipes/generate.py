"""Opens a model that was trained here, or that of a Hugging Face folder, to write text with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flax import nnx

from .config import TOKENIZER_FILE, DataConfig, RunConfig
from .errors import RecipeError
from .gpt.generate import Writer, writes
from .hf import load
from .run.scaling import plain
from .run.state import load_trained, with_run_tokenizer
from .text import SubwordTokenizer, open_tokenizer, require_vocab


def open_run(config: RunConfig, say: Callable[[str], None]) -> Writer:
    """The model of a run with its tokenizer."""
    graphdef, state = load_trained(config, say)
    model: Any = nnx.merge(graphdef, *plain(config.scalify, (state.params, state.rest)))
    data = with_run_tokenizer(config).data
    if not writes(model) or not isinstance(data, DataConfig):
        raise RecipeError(
            f"recipe: expected a model that continues text; got one of recipe {config.recipe}; "
            "name a config of recipe gpt"
        )
    tokenizer = open_tokenizer(data)
    require_vocab(tokenizer, model.config.vocab)
    return Writer.of_run(model, tokenizer, data.sequence_length)


def open_folder(folder: str, adapter: str | None = None) -> Writer:
    """The decoder of a Hugging Face folder with its tokenizer; its text ends as the folder says.

    `adapter` is the folder of a LoRA adapter that is added to its weights.
    """
    pretrained = load(folder, "lm", adapter=adapter)
    tokenizer = SubwordTokenizer.read(Path(folder) / TOKENIZER_FILE, key=folder)
    require_vocab(tokenizer, pretrained.config.vocab, folder)
    longest = pretrained.config.context
    assert longest is not None, "a folder states the longest sequence"
    ends = pretrained.source.ends
    return Writer(pretrained.model, tokenizer, longest, start=tokenizer.start, ends=ends)

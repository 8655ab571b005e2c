"""A GPT as `recipes.train` sees it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..config import Config
from ..data import ByteTokenizer, Corpus, load_corpus
from ..generate import sample_text
from ._build import GPT, build as build


def load_data(config: Config) -> Corpus:
    """The text of the config, in windows."""
    return load_corpus(config.data, ByteTokenizer())


def closing(config: Config, data: Corpus, model: GPT, folder: Path) -> Iterator[str]:
    """A sample of the model's own text."""
    if config.train.sample_tokens:
        text = sample_text(
            model,
            ByteTokenizer(),
            "\n",
            tokens=config.train.sample_tokens,
            seed=config.seed,
            context=config.data.sequence_length,
        )
        yield f"sample:{text}"

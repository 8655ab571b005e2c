"""A BERT from a Hugging Face folder under the head of a task, in standard parametrization."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..hf import Pretrained, Task, load
from .config import FinetuneConfig

TASKS: dict[str, Task] = {"squad": "question_answering", "classification": "classification"}


class PlainModel(nnx.Module):
    """A model of `recipes.hf`, called as `TaskModel`."""

    def __init__(self, bert: Any):
        self.bert = bert

    def __call__(
        self, ids: jax.Array, segments: jax.Array, mask: jax.Array, *, deterministic: bool = True
    ) -> jax.Array:
        """Logits (batch, time, 2) or (batch, classes)."""
        return self.bert(ids, segments, mask, deterministic=deterministic)

    def loss(
        self,
        ids: jax.Array,
        segments: jax.Array,
        mask: jax.Array,
        *labels: jax.Array,
        deterministic: bool = True,
    ) -> jax.Array:
        """Mean cross entropy of a label (batch,), or of two: start and end."""
        label = labels[0] if len(labels) == 1 else jnp.stack(labels, axis=-1)
        return self.bert.loss(ids, label, segments, mask, deterministic=deterministic)


def read_plain(config: FinetuneConfig, classes: int | None) -> Pretrained:
    """The folder that a config names, with a new head where it has none of the task.

    Args:
      config: The run; its `scalify` says what the products' operands are in.
      classes: Number of labels; None for a task that has none.

    Raises:
      RecipeError: As `recipes.hf.load`.
    """
    return load(
        config.init,
        TASKS[config.task],
        new_head=True,
        classes=classes,
        dropout=config.dropout,
        param_dtype=jnp.float32,
        scalify=config.scalify,
        seed=config.seed,
    )

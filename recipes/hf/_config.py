"""From a config.json to the shape of one of our models, or a message about what is not supported.

The defaults are those of `transformers`, which leaves out of the file what is a default.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from ..config import Count, Flag, Fraction, GPTModelConfig, Positive, Section, Whole
from ..errors import RecipeError
from ._folder import CONFIG, read_config

Task = Literal["lm", "masked_lm", "question_answering", "classification"]

ARCHITECTURES: dict[str, tuple[str, Task | None]] = {
    "GPT2LMHeadModel": ("gpt2", "lm"),
    "GPT2Model": ("gpt2", "lm"),
    "BertModel": ("bert", None),
    "BertForPreTraining": ("bert", "masked_lm"),
    "BertForMaskedLM": ("bert", "masked_lm"),
    "BertForQuestionAnswering": ("bert", "question_answering"),
    "BertForSequenceClassification": ("bert", "classification"),
}
"""Model type and task of each architecture; a bare encoder has no task."""
TASKS: dict[str, dict[Task, str]] = {
    "gpt2": {"lm": "GPT2LMHeadModel"},
    "bert": {
        "masked_lm": "BertForMaskedLM",
        "question_answering": "BertForQuestionAnswering",
        "classification": "BertForSequenceClassification",
    },
}
"""The tasks of each model type, and the architecture that stands for each."""


class BertConfig(Section):
    """The shape of a BERT."""

    vocab: Count = Field(default=30522, description="number of token ids")
    width: Count = Field(default=768, description="size of the residual stream")
    layers: Count = Field(default=12, description="number of Transformer layers")
    heads: Count = Field(default=12, description="number of attention heads")
    hidden: Count = Field(default=3072, description="hidden size of the MLP")
    context: Count = Field(default=512, description="number of learned positions")
    segments: Count = Field(default=2, description="number of segment (token type) ids")
    norm_eps: Positive = Field(default=1e-12, description="added to the variance")
    activation: Literal["gelu", "gelu_new", "relu"] = Field(
        default="gelu", description="of the MLP and of the masked-LM head; gelu is the exact one"
    )
    tied_readout: Flag = Field(
        default=True, description="whether the masked-LM head uses the embedding table"
    )
    classes: Count = Field(default=2, description="labels of the classification head")
    dropout: Fraction = Field(default=0.1, description="share of activations dropped")


class _Gpt2File(BaseModel):
    model_type: Literal["gpt2"]
    vocab_size: Count = 50257
    n_positions: Count = 1024
    n_embd: Count = 768
    n_layer: Count = 12
    n_head: Count = 12
    n_inner: Count | None = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    layer_norm_epsilon: Positive = 1e-5
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: Flag = True


class _BertFile(BaseModel):
    model_type: Literal["bert"]
    vocab_size: Count = 30522
    hidden_size: Count = 768
    num_hidden_layers: Count = 12
    num_attention_heads: Count = 12
    intermediate_size: Count = 3072
    hidden_act: Literal["gelu", "gelu_new", "relu"] = "gelu"
    hidden_dropout_prob: Fraction = 0.1
    max_position_embeddings: Count = 512
    type_vocab_size: Count = 2
    layer_norm_eps: Positive = 1e-12
    position_embedding_type: Literal["absolute"] = "absolute"
    is_decoder: Literal[False] = False
    add_cross_attention: Literal[False] = False
    tie_word_embeddings: Flag = True
    id2label: dict[str, str] | None = None
    num_labels: Whole | None = None


def model_type(config: dict[str, Any], path: Path) -> str:
    """The model type of a config.json.

    Raises:
      RecipeError: It is none of `TASKS`.
    """
    kind = config.get("model_type")
    if kind not in TASKS:
        raise RecipeError(
            f"{path / CONFIG}: expected model_type {' or '.join(TASKS)}; got {kind!r}; no other "
            "architecture is supported"
        )
    return kind


def task_of(config: dict[str, Any], wanted: Task | None, path: Path) -> Task:
    """The task asked for, or else that of the architecture in a config.json.

    Raises:
      RecipeError: The architecture is not supported, has no task, or not the one asked for.
    """
    kind = model_type(config, path)
    if wanted is not None and wanted not in TASKS[kind]:
        raise RecipeError(
            f"{path}: expected a task of {kind}, {' or '.join(TASKS[kind])}; got {wanted!r}; load "
            "another folder or choose another task"
        )
    listed = config.get("architectures") or [None]
    architecture = listed[0]
    known = [name for name, (owner, _) in ARCHITECTURES.items() if owner == kind]
    if architecture is not None and architecture not in known:
        raise RecipeError(
            f"{path / CONFIG}: expected an architecture of {', '.join(known)}; got "
            f"{architecture!r}; no other is supported"
        )
    task = wanted or (ARCHITECTURES[architecture][1] if architecture else None)
    if task is None:
        if len(TASKS[kind]) > 1:
            raise RecipeError(
                f"{path / CONFIG}: expected an architecture with a task; got {architecture!r}; "
                f"choose the task, {' or '.join(TASKS[kind])}"
            )
        (task,) = TASKS[kind]
    return task


def gpt2_shape(config: dict[str, Any], path: Path) -> GPTModelConfig:
    """The GPT that a GPT-2's config.json describes.

    Raises:
      RecipeError: A value is missing, wrong, or of a variant that is not supported.
    """
    file = _validated(_Gpt2File, config, path)
    shape = {
        "library": "plain",
        "vocab": file.vocab_size,
        "width": file.n_embd,
        "layers": file.n_layer,
        "heads": file.n_head,
        "mlp_ratio": (file.n_inner or 4 * file.n_embd) / file.n_embd,
        "norm": "layer",
        "norm_eps": file.layer_norm_epsilon,
        "bias": True,
        "positions": "learned",
        "context": file.n_positions,
        "tied_readout": file.tie_word_embeddings,
    }
    return _validated(GPTModelConfig, shape, path)


def with_shape(folder: str, given: Any) -> Any:
    """The `model` section of a config whose parameters come from a folder of GPT-2.

    Args:
      folder: Has config.json.
      given: What the config has for the section: dropout, or keys that agree with the folder.

    Raises:
      RecipeError: The folder is no GPT-2's, or a key does not agree with it.
    """
    shape = gpt2_shape(read_config(Path(folder)), Path(folder)).model_dump()
    given = {} if given is None else given
    if not isinstance(given, dict):
        return given  # for the config to complain about
    for key, value in given.items():
        if key != "dropout" and key in shape and value != shape[key]:
            raise RecipeError(
                f"model.{key}: expected {shape[key]!r}, that of init {folder}; got {value!r}; "
                "remove it"
            )
    return shape | given


def bert_shape(config: dict[str, Any], path: Path) -> BertConfig:
    """The BERT that a config.json describes.

    Raises:
      RecipeError: A value is missing, wrong, or of a variant that is not supported.
    """
    file = _validated(_BertFile, config, path)
    if file.hidden_size % file.num_attention_heads:
        raise RecipeError(
            f"{path / CONFIG}: expected num_attention_heads that divide hidden_size; got "
            f"{file.num_attention_heads} and {file.hidden_size}; correct the file"
        )
    return BertConfig(
        vocab=file.vocab_size,
        width=file.hidden_size,
        layers=file.num_hidden_layers,
        heads=file.num_attention_heads,
        hidden=file.intermediate_size,
        context=file.max_position_embeddings,
        segments=file.type_vocab_size,
        norm_eps=file.layer_norm_eps,
        activation=file.hidden_act,
        tied_readout=file.tie_word_embeddings,
        classes=len(file.id2label or ()) or file.num_labels or 2,
        dropout=file.hidden_dropout_prob,
    )


def shape_of_bert(folder: str) -> BertConfig:
    """The shape of the BERT in a folder, from its config.json alone.

    Raises:
      RecipeError: As `bert_shape`, or there is no such file.
    """
    return bert_shape(read_config(Path(folder)), Path(folder))


def _validated(schema: type, values: dict[str, Any], path: Path) -> Any:
    try:
        return schema(**values)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"])) or "the shape"
        expected = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        got = "" if problem["type"] == "value_error" else f"; got {problem['input']!r}"
        raise RecipeError(
            f"{path / CONFIG}: {key}: expected {expected}{got}; no other variant is supported"
        ) from error

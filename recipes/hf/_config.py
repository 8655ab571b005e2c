"""From a config.json to the shape of one of our models, or a message about what is not supported.

The defaults are those of `transformers`, which leaves out of the file what is a default.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from ..config import Count, Flag, Fraction, Positive, Section, Whole
from ..errors import RecipeError
from ._decoders import DECODERS
from ._folder import CONFIG, read_config
from ._schema import validated

Task = Literal["lm", "masked_lm", "question_answering", "classification"]

ARCHITECTURES: dict[str, tuple[str, Task | None]] = {
    "GPT2Model": ("gpt2", "lm"),
    "GPT2LMHeadModel": ("gpt2", "lm"),
    "LlamaModel": ("llama", "lm"),
    "LlamaForCausalLM": ("llama", "lm"),
    "MistralModel": ("mistral", "lm"),
    "MistralForCausalLM": ("mistral", "lm"),
    "Qwen2Model": ("qwen2", "lm"),
    "Qwen2ForCausalLM": ("qwen2", "lm"),
    "Qwen3Model": ("qwen3", "lm"),
    "Qwen3ForCausalLM": ("qwen3", "lm"),
    "Gemma2Model": ("gemma2", "lm"),
    "Gemma2ForCausalLM": ("gemma2", "lm"),
    "Gemma3TextModel": ("gemma3_text", "lm"),
    "Gemma3ForCausalLM": ("gemma3_text", "lm"),
    "BertModel": ("bert", None),
    "BertForPreTraining": ("bert", "masked_lm"),
    "BertForMaskedLM": ("bert", "masked_lm"),
    "BertForQuestionAnswering": ("bert", "question_answering"),
    "BertForSequenceClassification": ("bert", "classification"),
    "RobertaModel": ("roberta", None),
    "RobertaForMaskedLM": ("roberta", "masked_lm"),
    "RobertaForQuestionAnswering": ("roberta", "question_answering"),
    "RobertaForSequenceClassification": ("roberta", "classification"),
}
"""Model type and task of each architecture; a bare encoder has no task."""
TASKS: dict[str, dict[Task, str]] = {
    kind: {task: name for name, (own, task) in ARCHITECTURES.items() if own == kind and task}
    for kind in dict.fromkeys(kind for kind, _ in ARCHITECTURES.values())
}
"""The tasks of each model type, and the architecture that stands for each: the last one."""


class BertConfig(Section):
    """The shape of a BERT or RoBERTa, read from its config.json; what else is there is left."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    model_type: Literal["bert", "roberta"] = "bert"
    vocab: Count = Field(30522, alias="vocab_size")
    width: Count = Field(768, alias="hidden_size")
    layers: Count = Field(12, alias="num_hidden_layers")
    heads: Count = Field(12, alias="num_attention_heads")
    hidden: Count = Field(3072, alias="intermediate_size")
    context: Count = Field(512, alias="max_position_embeddings")
    segments: Count = Field(2, alias="type_vocab_size")
    norm_eps: Positive = Field(1e-12, alias="layer_norm_eps")
    activation: Literal["gelu", "gelu_new", "relu"] = Field("gelu", alias="hidden_act")
    dropout: Fraction = Field(0.1, alias="hidden_dropout_prob")
    tied_readout: Flag = Field(True, alias="tie_word_embeddings")
    classes: Count = 2
    pad: Whole | None = Field(None, alias="pad_token_id")
    # Variants that the model does not have.
    position_embedding_type: Literal["absolute"] = "absolute"
    is_decoder: Literal[False] = False
    add_cross_attention: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, file: dict[str, Any]) -> dict[str, Any]:
        """RoBERTa's own defaults; and classes, of which a file has the names or the number."""
        labels = file.get("id2label")
        count = len(labels) if isinstance(labels, dict) else file.get("num_labels")
        own = (
            {"vocab_size": 50265, "pad_token_id": 1} if file.get("model_type") == "roberta" else {}
        )
        return {**own, **({"classes": count} if count else {}), **file}

    @property
    def padding(self) -> int | None:
        """The id after which RoBERTa counts positions; None for BERT, which counts from 0."""
        return self.pad if self.model_type == "roberta" else None

    @property
    def longest(self) -> int:
        """Positions that tokens can have."""
        return self.context if self.padding is None else self.context - self.padding - 1

    @model_validator(mode="after")
    def _shape_fits(self) -> Self:
        if self.model_type == "roberta" and (self.pad is None or self.longest < 1):
            raise ValueError(
                "a pad_token_id below max_position_embeddings - 1, as positions count from it; got "
                f"{self.pad} and {self.context}; correct the file"
            )
        if self.width % self.heads:
            raise ValueError(
                "num_attention_heads that divide hidden_size; got "
                f"{self.heads} and {self.width}; correct the file"
            )
        return self


def model_type(config: dict[str, Any], path: Path) -> str:
    """The model type of a config.json."""
    kind = config.get("model_type")
    if kind not in TASKS:
        raise RecipeError(
            f"{path / CONFIG}: expected model_type {', '.join(TASKS)}; got {kind!r}; no other "
            "architecture is supported"
        )
    return kind


def task_of(config: dict[str, Any], wanted: Task | None, path: Path) -> Task:
    """The task asked for, or else that of the architecture in a config.json."""
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


def with_shape(folder: str, given: Any) -> Any:
    """The `model` section of a config whose parameters come from a folder of a decoder."""
    path, file = Path(folder), read_config(Path(folder))
    if (kind := model_type(file, path)) not in DECODERS:
        raise RecipeError(
            f"{path / CONFIG}: expected model_type {', '.join(DECODERS)}; got {kind!r}; give "
            "another folder as init"
        )
    shape = DECODERS[kind](file, path).model_dump(mode="json")
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
    """The BERT or RoBERTa that a config.json describes."""
    return validated(BertConfig, config, path)


def shape_of_bert(folder: str) -> BertConfig:
    """The shape of the BERT in a folder, from its config.json alone."""
    return bert_shape(read_config(Path(folder)), Path(folder))


SHAPES: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    **DECODERS,
    "bert": bert_shape,
    "roberta": bert_shape,
}
"""What reads the shape of a model, by model type."""

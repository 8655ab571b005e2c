"""Which models and tasks are read, and the shape and task of the one in a folder."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from ..config import GPTModelConfig
from ..errors import RecipeError, clipped
from ._decoders import DECODERS
from ._encoders import ENCODERS, BertConfig, ModernBertConfig
from ._folder import CONFIG, read_config

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
    "ModernBertModel": ("modernbert", None),
    "ModernBertForMaskedLM": ("modernbert", "masked_lm"),
    "ModernBertForQuestionAnswering": ("modernbert", "question_answering"),
    "ModernBertForSequenceClassification": ("modernbert", "classification"),
}
"""Model type and task of each architecture; a bare encoder has no task."""
TASKS: dict[str, dict[Task, str]] = {
    kind: {task: name for name, (own, task) in ARCHITECTURES.items() if own == kind and task}
    for kind in dict.fromkeys(kind for kind, _ in ARCHITECTURES.values())
}
"""The tasks of each model type, and the architecture that stands for each: the last one."""


def model_type(config: dict[str, Any], path: Path) -> str:
    """The model type of a config.json, which brings no code of its own for the model.

    Such code may compute something else under the names of the standard classes (MosaicBERT is a
    "BertForMaskedLM" with ALiBi). Code of a tokenizer is not needed, as tokenizer.json is read.
    """
    kind = config.get("model_type")
    if kind not in TASKS:
        raise RecipeError(
            f"{path / CONFIG}: expected model_type {', '.join(TASKS)}; got {kind!r}; no other "
            "architecture is supported"
        )
    code = config.get("auto_map") or {}
    if not isinstance(code, dict) or code.keys() - {"AutoTokenizer"}:
        raise RecipeError(
            f"{path / CONFIG}: auto_map: expected no code for the model but that of transformers; "
            f"got {clipped(code)}, which is not run and may compute something else; if it does "
            "not, remove auto_map"
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


def shape_of_decoder(folder: str) -> GPTModelConfig:
    """The shape of the decoder in a folder, from its config.json alone."""
    path, file = Path(folder), read_config(Path(folder))
    return DECODERS[_one_of(DECODERS, file, path)](file, path)


def shape_of_bert(folder: str) -> BertConfig | ModernBertConfig:
    """The shape of the encoder in a folder, from its config.json alone."""
    path, file = Path(folder), read_config(Path(folder))
    return ENCODERS[_one_of(ENCODERS, file, path)](file, path)


def labels_of(file: dict[str, Any]) -> tuple[str, ...]:
    """Names of the labels in the order of their ids, where a config.json has them."""
    names = file.get("id2label")
    if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))):
        return ()
    return tuple(str(names[str(index)]) for index in range(len(names)))


def labels_in(folder: str) -> tuple[str, ...]:
    """`labels_of` the config.json of a folder."""
    return labels_of(read_config(Path(folder)))


def _one_of(kinds: Iterable[str], file: dict[str, Any], path: Path) -> str:
    """The model type of a config.json, which is to be one of these."""
    if (kind := model_type(file, path)) not in kinds:
        raise RecipeError(
            f"{path / CONFIG}: expected model_type {', '.join(kinds)}; got {kind!r}; give another "
            "folder as init"
        )
    return kind


SHAPES: dict[str, Callable[[dict[str, Any], Path], Any]] = {**DECODERS, **ENCODERS}
"""What reads the shape of a model, by model type."""

"""Load a model from a Hugging Face folder, and save it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from unitscale import to_array

from ..config import GPTModelConfig, PrecisionConfig
from ..errors import RecipeError
from ._bert import Bert
from ._config import ARCHITECTURES, EncoderConfig, Task, shape_in, task_of
from ._folder import CONFIG, FLOATS, INDEX, SINGLE, Folder, read_folder, write_folder
from ._lora import merge_adapter
from ._names import Table, full_name, head_part, is_unused, table_of
from .plain import GPT


@dataclass(frozen=True)
class Pretrained:
    """A plain `flax.nnx` model loaded from a folder; `drawn` names the tensors of a new head."""

    model: GPT | Bert
    config: GPTModelConfig | EncoderConfig
    task: Task
    drawn: tuple[str, ...]
    source: Folder
    table: Table

    @property
    def params(self) -> nnx.State:
        """The model's parameters."""
        return nnx.state(self.model, nnx.Param)


def load(
    folder: str | Path,
    task: Task | None = None,
    *,
    new_head: bool = False,
    classes: int | None = None,
    dropout: float | None = None,
    dtype: Any = jnp.float32,
    param_dtype: Any = None,
    precision: PrecisionConfig | None = None,
    remat: str | None = None,
    adapter: str | Path | None = None,
    on_host: bool = False,
    seed: int = 0,
) -> Pretrained:
    """Load a decoder (GPT-2, the Llama family) or an encoder (the BERTs) from a local folder.

    Args:
      folder: Has config.json and model.safetensors (or shards with their index).
      task: None takes that of the architecture that config.json names.
      new_head: Draw the head of the task where the folder has none; its own pooler is kept.
      classes: Labels of a new classification head; None for those of config.json.
      dropout: Share of activations dropped in training; None for that of config.json.
      dtype: Type of activations.
      param_dtype: Type of parameters; None keeps the types of the files.
      precision: Whether linear layers multiply in FP8 under `unitscale.scalify`.
      remat: `model.remat` of a decoder.
      adapter: The folder of a LoRA adapter to add to a decoder's weights, as PEFT writes it.
      on_host: Leave parameters in the memory of the host, as NumPy arrays for `adapt`.
      seed: Seed of a new head and of dropout.

    Raises:
      RecipeError: A file is missing or damaged, the architecture is not supported, or tensors are
        missing, unknown or of other shapes.
    """
    source = read_folder(Path(folder))
    task = task_of(source.config, task, source.path)
    kind: str = source.config["model_type"]
    own = {"dropout": dropout, "remat": remat, "classes": classes if new_head else None}
    changes = {key: value for key, value in own.items() if value is not None}
    config = shape_in(source.config, source.path).model_copy(update=changes)
    kept = jnp.float32 if param_dtype is None else param_dtype

    def make() -> GPT | Bert:
        options: Any = {"dtype": dtype, "param_dtype": kept, "precision": precision}
        options["rngs"] = nnx.Rngs(params=seed, dropout=seed)
        return GPT(config, **options) if task == "lm" else Bert(config, task, **options)

    if on_host:  # parameters are shapes until they are filled; other state is initialized
        graphdef, params, _ = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
        rest = jax.jit(lambda: nnx.state(make(), nnx.Not(nnx.Param)))()
        model: Any = nnx.merge(graphdef, params, rest)
    else:
        model = make()
    table = table_of(kind, task, values_by_path(nnx.state(model, nnx.Param)).keys())
    drawn = _missing(table, kind, source, task, new_head)
    if classes is not None and not drawn and getattr(config, "classes", None) != classes:
        raise RecipeError(
            f"{source.path}: expected the classes of the folder's head; got {classes}; draw a new "
            "head for a folder without one"
        )
    _fill(model, table, source, param_dtype, np if on_host else jnp)
    if adapter is not None:
        merge_adapter(model, adapter)
    return Pretrained(model, config, task, drawn, source, table)


def save(
    pretrained: Pretrained,
    folder: str | Path,
    params: Any = None,
    labels: Sequence[str] | None = None,
) -> None:
    """Write a model's folder: the same files, with the same names, shapes and types of tensors.

    Args:
      pretrained: From `load`.
      folder: Where to write; it may be the one that was read.
      params: Trained parameters, a state of arrays or ScaledArrays; None for the model's own.
      labels: Names of a classifier's labels; None for those of the folder.

    Raises:
      RecipeError: A weight is not finite in the type of its file, or a file cannot be written.
    """
    source = _with_new_head(pretrained) if pretrained.drawn else pretrained.source
    if labels and tuple(labels) != getattr(pretrained.config, "labels", ()):
        source = _with_config(source, labels)
    values = values_by_path(pretrained.params if params is None else params)
    tensors = {}
    for name, old in source.tensors.items():
        entry = pretrained.table.get(full_name(name, source.config["model_type"]))
        if entry is None:
            tensors[name] = old
            continue
        parts = {path: np.asarray(to_array(values[path])) for path in entry.paths}
        tensors[name] = entry.pack(parts).astype(old.dtype)
        if not np.isfinite(tensors[name]).all() and np.isfinite(old).all():
            raise RecipeError(
                f"{name} has values that are not finite in {old.dtype}, the type of its file; "
                "save an earlier state, or train in a wider type"
            )
    write_folder(Path(folder), source, tensors)


def values_by_path(state: Any) -> dict[str, Any]:
    return {".".join(map(str, p)): leaf.get_value() for p, leaf in nnx.to_flat_state(state)}


def _missing(
    table: Table, kind: str, source: Folder, task: Task, new_head: bool
) -> tuple[str, ...]:
    """Return the names of head tensors to draw; refuse other differences from the table."""
    names = {name: full_name(name, kind) for name in source.tensors}
    needed = [name for name, tensor in table.items() if not tensor.tied]
    missing = [name for name in needed if name not in names.values()]
    # Whole parts of the head: a classifier is new on a pooler that is there.
    gone = {head_part(name) for name in missing}
    head = [name for name in needed if table[name].head and head_part(name) in gone]
    if missing and (missing != head or not new_head):
        todo = "choose its own task, or draw a new head" if missing == head else "copy the folder"
        raise RecipeError(
            f"{source.path}: expected all tensors for task {task}; {_list(missing)} missing; {todo}"
        )
    others = (name for name, full in names.items() if full not in table)
    if extra := sorted(name for name in others if not is_unused(names[name], kind)):
        raise RecipeError(
            f"{source.path}: expected only tensors that {CONFIG} accounts for; {_list(extra)} "
            f"extra; give the {CONFIG} that belongs to the weights"
        )
    return tuple(missing)


def _list(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _fill(model: nnx.Module, table: Table, source: Folder, param_dtype: Any, library: Any) -> None:
    """Set a model's parameters from the tensors, as arrays of `library` (NumPy or jax.numpy)."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    variables = {".".join(map(str, path)): cast("nnx.Param", leaf) for path, leaf in flat}
    filled: dict[str, str] = {}
    for name, array in source.tensors.items():
        entry = table.get(full_name(name, source.config["model_type"]))
        if entry is None:
            continue
        shapes = {path: np.empty(variables[path].get_value().shape) for path in entry.paths}
        if array.shape != (wanted := entry.pack(shapes).shape) or array.dtype not in FLOATS:
            raise RecipeError(
                f"{source.path}: {name} must be {list(wanted)} of float32, float16 or bfloat16; "
                f"got {list(array.shape)} of {array.dtype}; give the {CONFIG} that belongs to the "
                "weights"
            )
        for path, piece in entry.unpack(array).items():
            if path not in filled:
                filled[path] = name
                value = np.ascontiguousarray(piece)
                variables[path].set_value(library.asarray(value, param_dtype or value.dtype))
            elif source.tensors[filled[path]].tobytes() != array.tobytes():
                raise RecipeError(
                    f"{source.path}: {filled[path]} and {name} are tied but differ; set "
                    f"tie_word_embeddings false in {CONFIG} if they are not tied"
                )


def _with_new_head(pretrained: Pretrained) -> Folder:
    """Return the folder with the new head in a single file of weights and in config.json."""
    source, table = pretrained.source, pretrained.table
    kind = source.config["model_type"]
    full = {full_name(name, kind): array for name, array in source.tensors.items()}
    tensors = {name: array for name, array in full.items() if name in table}
    dtype, values = next(iter(tensors.values())).dtype, values_by_path(pretrained.params)
    tensors |= {name: np.asarray(table[name].pack(values), dtype) for name in pretrained.drawn}
    labels: list[str] = []
    if pretrained.task == "classification":
        classes = cast("EncoderConfig", pretrained.config).classes
        labels = [f"LABEL_{index}" for index in range(classes)]
    texts = {name: text for name, text in source.texts.items() if name != INDEX}
    files = {SINGLE: ({"format": "pt"}, list(tensors))}
    source = replace(source, texts=texts, files=files, tensors=tensors)
    return _with_config(source, labels, architectures=[ARCHITECTURES[kind][pretrained.task][0]])


def _with_config(source: Folder, labels: Sequence[str], **changes: Any) -> Folder:
    if labels:
        changes["id2label"] = {str(index): label for index, label in enumerate(labels)}
        changes["label2id"] = {label: index for index, label in enumerate(labels)}
    config = source.config | changes
    text = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return replace(source, config=config, texts=source.texts | {CONFIG: text})

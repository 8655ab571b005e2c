"""From a Hugging Face folder to a model, and back to the same files."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..config import GPTModelConfig, ScalifyConfig
from ..errors import RecipeError
from ._bert import BERTS, Bert
from ._config import (
    SHAPES,
    TASKS,
    BertConfig,
    ModernBertConfig,
    Task,
    labels_of,
    model_type,
    task_of,
)
from ._folder import CONFIG, SINGLE, Folder, read_folder, write_folder
from ._modernbert import MODERN
from ._names import Table, full_name, head_part, is_buffer, is_other_head, table_of
from ._peft import merge_adapter
from ._split import join
from ._tensors import make_header
from .plain import GPT

# The model for each task, by model type; the others are GPTs.
MODELS: dict[str, dict[Task, type[Bert]]] = {"bert": BERTS, "roberta": BERTS, "modernbert": MODERN}
_FLOATS = tuple(np.dtype(dtype) for dtype in (np.float32, np.float16, jnp.bfloat16))


@dataclass(frozen=True)
class Pretrained:
    """A model that was read from a folder.

    Attributes:
      model: A plain `flax.nnx` model, of standard parametrization.
      config: Its shape.
      task: What its head is for.
      drawn: Names of the tensors of a new head, which the folder does not have.
      unused: Names of the tensors of other heads.
      source: The folder, as it was read.
    """

    model: GPT | Bert
    config: GPTModelConfig | BertConfig | ModernBertConfig
    task: Task
    drawn: tuple[str, ...]
    unused: tuple[str, ...]
    source: Folder

    @property
    def params(self) -> nnx.State:
        """The parameters: a state to `split` into ScaledArrays, or to train."""
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
    scalify: ScalifyConfig | None = None,
    remat: str | None = None,
    adapter: str | Path | None = None,
    on_host: bool = False,
    seed: int = 0,
) -> Pretrained:
    """Reads a decoder (GPT-2, the Llama family) or an encoder (the BERTs) from a local folder.

    Args:
      folder: Has config.json and model.safetensors (or shards with their index).
      task: "lm" for a decoder; "masked_lm", "question_answering" or "classification" for BERT. None
        takes that of the architecture that config.json names.
      new_head: Draws the head of the task from `seed` where the folder has none of it; a pooler
        that the folder has is kept.
      classes: Labels of a new classification head; None for those of config.json.
      dropout: Share of activations dropped in training; None for that of config.json (BERT) or
        none (decoders). Attention has no dropout of its own.
      dtype: What activations are computed in.
      param_dtype: What parameters are stored in; None keeps the types of the files.
      scalify: Formats of the products of linear layers, where the model runs under
        `unitscale.scalify`.
      remat: `model.remat` of a decoder; None for "none".
      adapter: The folder of a LoRA adapter, as PEFT writes it, that is added to a decoder's
        weights; None for none.
      on_host: Leaves parameters in the memory of the host, as NumPy arrays for `adapt`, and draws
        no others.
      seed: Decides a new head and the draws of dropout.

    Raises:
      RecipeError: A file is missing or damaged, the weights are pickle files, the architecture is
        not supported, or tensors are missing, unknown or of other shapes; the message names them.
    """
    source = read_folder(folder)
    kind, task = model_type(source.config, source.path), task_of(source.config, task, source.path)
    own = {"dropout": dropout, "remat": remat, "classes": classes if new_head else None}
    read = SHAPES[kind](source.config, source.path)
    config = read.model_copy(update={key: x for key, x in own.items() if x is not None})
    build: Any = MODELS.get(kind, {}).get(task, GPT)
    kept = jnp.float32 if param_dtype is None else param_dtype

    def make() -> GPT | Bert:
        rngs = nnx.Rngs(params=seed, dropout=seed)
        return build(config, dtype=dtype, param_dtype=kept, scalify=scalify, rngs=rngs)

    model = _undrawn(make) if on_host else make()
    table = table_of(kind, config, task)
    drawn, unused = _matched(table, kind, source, task, new_head)
    if classes is not None and not drawn and getattr(config, "classes", None) != classes:
        raise RecipeError(
            f"{source.path}: expected classes to be None or that of the folder; got {classes}; "
            "remove it, or load a folder without a head and draw a new one"
        )
    _fill(model, table, kind, source, param_dtype, np if on_host else jnp)
    if adapter is not None:
        if not isinstance(model, GPT):
            raise RecipeError(
                f"{source.path}: expected a decoder, which an adapter is for; got {kind}; load it "
                "without an adapter"
            )
        merge_adapter(model, adapter)
    return Pretrained(model, config, task, drawn, unused, source)


def save(
    pretrained: Pretrained,
    folder: str | Path,
    params: Any = None,
    labels: Sequence[str] | None = None,
) -> None:
    """Writes the folder of a model: the same files, byte for byte where nothing was trained.

    Tensors keep their names, order and types. With a new head there is one model.safetensors,
    without the heads of other tasks, and config.json names the new architecture.

    Args:
      pretrained: From `load`.
      folder: Where to write; it may be the one that was read.
      params: Trained parameters, a state of arrays or ScaledArrays; None for the model's own.
      labels: Names of a classifier's labels; None for those of the folder.

    Raises:
      RecipeError: A weight is not finite in the type of its file, or a file cannot be written.
    """
    source, kind = pretrained.source, model_type(pretrained.source.config, pretrained.source.path)
    table = table_of(kind, pretrained.config, pretrained.task)
    values = values_by_path(pretrained.params if params is None else params)
    if pretrained.drawn:
        source = _with_new_head(pretrained, table, kind)
    if labels and tuple(labels) != labels_of(source.config):
        source = _with_config(source, **_label_keys(labels))
    tensors = {}
    for name, old in source.tensors.items():
        entry = table.get(full_name(name, kind))
        if entry is None:
            tensors[name] = old
            continue
        tensors[name] = entry.pack({path: join(values[path], old.dtype) for path in entry.paths})
        if not np.isfinite(tensors[name]).all() and np.isfinite(old).all():
            raise RecipeError(
                f"{name} has values that are not finite in {old.dtype}, the type of its file; "
                "save an earlier state, or train in a wider type"
            )
    write_folder(Path(folder), source, tensors)


def _matched(
    table: Table, kind: str, source: Folder, task: Task, new_head: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tensors that are to be drawn and those not used, or complaints about the rest."""
    names = {name: full_name(name, kind) for name in source.tensors}
    found = set(names.values())
    missing = [name for name, tensor in table.items() if not tensor.tied and name not in found]
    head = [name for name, tensor in table.items() if tensor.head and not tensor.tied]
    gone = {head_part(name) for name in missing}
    # Whole parts of the head: a classifier is new on a pooler that is there.
    if missing and set(missing) == {name for name in head if head_part(name) in gone}:
        if not new_head:
            raise RecipeError(
                f"{source.path}: expected the head of task {task}; got none of {_list(missing)}; "
                "choose the task that it was trained for, or draw a new head"
            )
    elif missing:
        raise RecipeError(
            f"{source.path}: expected every tensor of the model; {_list(missing)} missing; "
            "copy the whole folder"
        )
    others = {name for name, full in names.items() if full not in table}
    buffers = {name for name in others if is_buffer(names[name], kind)}
    unused = {name for name in others if is_other_head(names[name], kind)}
    if extra := sorted(others - buffers - unused):
        raise RecipeError(
            f"{source.path}: expected only tensors that {CONFIG} accounts for; {_list(extra)} "
            f"extra; give the {CONFIG} that belongs to the weights"
        )
    return tuple(missing), tuple(sorted(unused))


def values_by_path(state: Any) -> dict[str, Any]:
    """What the variables of a state hold, by dotted path."""
    return {".".join(map(str, p)): leaf.get_value() for p, leaf in nnx.to_flat_state(state)}


def _list(names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more}"


def _undrawn(make: Callable[[], Any]) -> Any:
    """A model whose parameters are shapes alone; other state is as it is made."""
    graphdef, params, _ = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    rest = jax.jit(lambda: nnx.state(make(), nnx.Not(nnx.Param)))()
    return nnx.merge(graphdef, params, rest)


def _fill(
    model: nnx.Module, table: Table, kind: str, source: Folder, param_dtype: Any, library: Any
) -> None:
    """Sets the parameters of a model to what the tensors hold, as arrays of `library`."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    variables = {".".join(map(str, path)): cast("nnx.Param", leaf) for path, leaf in flat}
    filled: dict[str, str] = {}
    for name, array in source.tensors.items():
        entry = table.get(full_name(name, kind))
        if entry is None:
            continue
        shapes = {path: np.empty(variables[path].get_value().shape) for path in entry.paths}
        if array.shape != (wanted := entry.pack(shapes).shape) or array.dtype not in _FLOATS:
            raise RecipeError(
                f"{source.path}: {name} must be {list(wanted)} of float32, float16 or bfloat16; "
                f"got {list(array.shape)} of {array.dtype}; give the {CONFIG} that belongs to the "
                "weights"
            )
        for path, piece in entry.unpack(array).items():
            if path in filled:
                first = filled[path]
                if source.tensors[first].tobytes() != array.tobytes():
                    raise RecipeError(
                        f"{source.path}: expected {first} and {name} to be equal, as they are "
                        f"tied; got different numbers; set tie_word_embeddings false in {CONFIG} "
                        "if they are not"
                    )
                continue
            filled[path] = name
            value = np.ascontiguousarray(piece)
            variables[path].set_value(library.asarray(value, param_dtype or value.dtype))
    if param_dtype is None:  # a new head takes the type of the rest
        kept = next(iter(filled.values()))
        for path in variables.keys() - filled.keys():
            value = variables[path].get_value()
            variables[path].set_value(value.astype(source.tensors[kept].dtype))


def _with_new_head(pretrained: Pretrained, table: Table, kind: str) -> Folder:
    """The folder with one file of weights, the new head in it, and a config.json that says so."""
    source = pretrained.source
    kept = {
        name: array
        for name, array in source.tensors.items()
        if name not in pretrained.unused and full_name(name, kind) in table
    }
    dtype = next(iter(kept.values())).dtype
    tensors = {full_name(name, kind): array for name, array in kept.items()}
    drawn = values_by_path(pretrained.params)
    tensors |= {name: np.asarray(table[name].pack(drawn), dtype) for name in pretrained.drawn}
    changes: dict[str, Any] = {"architectures": [TASKS[kind][pretrained.task]]}
    if pretrained.task == "classification":
        classes = cast("BertConfig | ModernBertConfig", pretrained.config).classes
        changes |= _label_keys([f"LABEL_{index}" for index in range(classes)])
    texts = {name: text for name, text in source.texts.items() if not name.endswith("index.json")}
    header = make_header(tensors)
    source = replace(source, texts=texts, headers={SINGLE: header}, tensors=tensors)
    return _with_config(source, **changes)


def _label_keys(labels: Sequence[str]) -> dict[str, Any]:
    return {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
    }


def _with_config(source: Folder, **changes: Any) -> Folder:
    config = source.config | changes
    text = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
    return replace(source, config=config, texts=source.texts | {CONFIG: text})

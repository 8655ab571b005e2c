"""Load a model from a Hugging Face folder, and save it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from unitscale import to_array

from ..config import GPTModelConfig, PrecisionConfig
from ..errors import RecipeError
from ._bert import Bert
from ._config import ARCHITECTURES, EncoderConfig, Task, shape_in, task_of
from ._folder import (
    CONFIG,
    FLOATS,
    INDEX,
    SINGLE,
    Folder,
    Tensor,
    json_bytes,
    read_folder,
    write_folder,
)
from ._lora import merge_adapter
from ._names import Place, Table, full_name, head_part, is_unused, table_of
from ._quantized import Scheme, dequantize, quantized
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
    lazy: bool = False,
    keep_fp8: bool = False,
    seed: int = 0,
) -> Pretrained:
    """Load a decoder (GPT-2, the Llama family) or an encoder (the BERTs) from a local folder.

    Args:
      folder: Contains config.json and model.safetensors, or shards with their index.
      task: By default the task of the architecture in config.json.
      new_head: Draw a random head if the folder has none for the task; keep the folder's pooler.
      classes: Number of labels of a new classification head; by default from config.json.
      dropout: Dropout rate; by default from config.json.
      dtype: Dtype of activations.
      param_dtype: Dtype of parameters; by default the dtypes of the files.
      precision: Its `matmuls` decides whether linear layers use FP8 under `unitscale.scalify`.
      remat: `model.remat` of a decoder.
      adapter: Folder of a LoRA adapter, in PEFT's format, to add to a decoder's weights.
      lazy: Leave the parameters in the files, for `adapt`, which reads one after another.
      keep_fp8: Keep the FP8 weights of a quantized folder as ScaledArrays, for `adapt`; otherwise
        they are dequantized.
      seed: Seed of a new head and of dropout.

    Raises:
      RecipeError: A file is missing or damaged, the architecture is not supported, or tensors are
        missing, unknown or of other shapes.
    """
    source = dequantize(read_folder(Path(folder)))
    task = task_of(source.config, task, source.path)
    kind: str = source.config["model_type"]
    own = {"dropout": dropout, "remat": remat, "classes": classes if new_head else None}
    changes = {key: value for key, value in own.items() if value is not None}
    shape = shape_in(source.config, source.path)
    config = shape.model_copy(update=changes)

    def make() -> GPT | Bert:
        kept = param_dtype or jnp.float32
        options: Any = {"dtype": dtype, "param_dtype": kept, "precision": precision}
        options["rngs"] = nnx.Rngs(params=seed, dropout=seed)
        return GPT(config, **options) if task == "lm" else Bert(config, task, **options)

    graphdef, params, _ = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    table = table_of(kind, task, values_by_path(params).keys())
    drawn = _missing(table, kind, source, task, new_head)
    new = {path for name in drawn for path in table[name].paths}

    def is_drawn(path: Any, value: Any) -> bool:  # `_fill` sets all other parameters
        return not isinstance(value, nnx.Param) or ".".join(map(str, path)) in new

    others = nnx.filter_state(params, nnx.Not(is_drawn))
    model: Any = nnx.merge(graphdef, others, jax.jit(lambda: nnx.state(make(), is_drawn))())
    found = getattr(shape, "classes", None)
    if classes is not None and not drawn and found != classes:
        what = f"{source.path}: expected the {found} classes of the folder's own head"
        raise RecipeError(f"{what}; got {classes}; give a folder without a head for this task")
    narrow = source.narrow if keep_fp8 else {}
    _fill(model, table, source, param_dtype, lazy, narrow)
    if adapter is not None:
        merge_adapter(model, adapter)
    return Pretrained(model, config, task, drawn, source, table)


def save(
    pretrained: Pretrained,
    folder: str | Path,
    params: Any = None,
    labels: Sequence[str] | None = None,
    fp8: Scheme | None = None,
) -> None:
    """Write a model to a folder, with the file and tensor names of the folder it was loaded from.

    Args:
      pretrained: From `load`.
      folder: Where to write; may be the folder that was read.
      params: Trained parameters, a state of arrays or ScaledArrays; by default the model's.
      labels: Names of a classifier's labels; by default the folder's.
      fp8: Write linear layers in E4M3 with a scale per tensor, per output channel (both as
        compressed-tensors) or per block of 128 x 128, for serving; None keeps the files' dtypes.

    Raises:
      RecipeError: A weight is not finite in the dtype of its file, or a file cannot be written.
    """
    source = _with_new_head(pretrained) if pretrained.drawn else pretrained.source
    own = () if pretrained.drawn else getattr(pretrained.config, "labels", ())
    if labels and tuple(labels) != own:
        source = _with_config(source, labels)
    values = values_by_path(pretrained.params if params is None else params)
    tensors, linear, kind = dict(source.tensors), [], source.config["model_type"]

    def packed(name: str, entry: Place, old: Tensor) -> np.ndarray:
        parts = {path: np.asarray(to_array(values[path])) for path in entry.paths}
        array = entry.pack(parts).astype(old.dtype)
        if not np.isfinite(array).all() and np.isfinite(old).all():
            raise RecipeError(
                f"{name} has values that are not finite in {old.dtype}, the dtype of its file; "
                "save an earlier state, or start from files of a wider dtype"
            )
        return array

    for name, old in source.tensors.items():
        if (entry := pretrained.table.get(full_name(name, kind))) is not None:
            linear += [name] if entry.is_linear else []
            tensors[name] = replace(old, read=partial(packed, name, entry, old))
            tensors[name].read()  # raise its error before the first file is written
    source = replace(source, tensors=tensors)
    if fp8 is not None:
        if pretrained.task != "lm" or not linear:
            what = f"expected a decoder of the Llama family for FP8; got model_type {kind}"
            raise RecipeError(f"{source.path}: {what}")
        source = quantized(source, linear, fp8)
    write_folder(Path(folder), source)


def values_by_path(state: Any) -> dict[str, Any]:
    return {".".join(map(str, p)): leaf.get_value() for p, leaf in nnx.to_flat_state(state)}


def _missing(
    table: Table, kind: str, source: Folder, task: Task, new_head: bool
) -> tuple[str, ...]:
    """Return the names of head tensors to draw; raise an error for other missing or extra ones."""
    names = {name: full_name(name, kind) for name in source.tensors}
    needed = [name for name, tensor in table.items() if not tensor.tied]
    missing = [name for name in needed if name not in names.values()]
    # Parts of a head are drawn as a whole: the classifier, for example, but not an existing pooler.
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
            f"{source.path}: expected only tensors of the model in {CONFIG}; got {_list(extra)} as "
            f"well; give the {CONFIG} of these weights"
        )
    return tuple(missing)


def _list(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _fill(
    model: nnx.Module, table: Table, source: Folder, param_dtype: Any, lazy: bool, narrow: Any
) -> None:
    """Set a model's parameters one after another, as arrays of JAX or, if `lazy`, as tensors.

    The kernels of linear layers in `narrow`, which makes ScaledArrays by name, stay in FP8.
    """
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    variables: Any = {".".join(map(str, path)): variable for path, variable in state}
    filled: dict[str, str] = {}
    for name, array in source.tensors.items():
        entry = table.get(full_name(name, source.config["model_type"]))
        if entry is None:
            continue
        wanted = entry.shape_of([variables[path].get_value().shape for path in entry.paths])
        if array.shape != wanted or array.dtype not in FLOATS:
            raise RecipeError(
                f"{source.path}: {name} must be {list(wanted)} of float32, float16 or bfloat16; "
                f"got {list(array.shape)} of {array.dtype}; give the {CONFIG} of these weights"
            )
        is_narrow = entry.is_linear and name in narrow
        for path in entry.paths:
            if path not in filled:
                filled[path] = name
                shape, dtype = variables[path].get_value().shape, param_dtype or array.dtype
                piece = Tensor(shape, dtype, lambda e=entry, x=array, p=path: e.unpack(x.read())[p])
                value = narrow[name]().T if is_narrow else piece
                variables[path].set_value(value if lazy or is_narrow else jnp.asarray(value, dtype))
            elif source.tensors[filled[path]].read().tobytes() != array.read().tobytes():
                raise RecipeError(
                    f"{source.path}: {filled[path]} and {name} are tied but differ; set "
                    f"tie_word_embeddings false in {CONFIG} if they are not tied"
                )


def _with_new_head(pretrained: Pretrained) -> Folder:
    """Return the folder with a new head added to config.json and to a single file of weights."""
    source, table = pretrained.source, pretrained.table
    kind = source.config["model_type"]
    full = {full_name(name, kind): array for name, array in source.tensors.items()}
    tensors = {name: array for name, array in full.items() if name in table}
    dtype, values = next(iter(tensors.values())).dtype, values_by_path(pretrained.params)
    for name in pretrained.drawn:
        array = np.asarray(table[name].pack(values), dtype)
        tensors[name] = Tensor(array.shape, array.dtype, partial(np.asarray, array))
    config: Any = pretrained.config
    count = config.classes if pretrained.task == "classification" else 0
    labels = [f"LABEL_{index}" for index in range(count)]
    texts = {name: text for name, text in source.texts.items() if name != INDEX}
    files = {SINGLE: ({"format": "pt"}, list(tensors))}
    source = replace(source, texts=texts, files=files, tensors=tensors)
    return _with_config(source, labels, architectures=[ARCHITECTURES[kind][pretrained.task][0]])


def _with_config(source: Folder, labels: Sequence[str], **changes: Any) -> Folder:
    if labels:
        changes["id2label"] = {str(index): label for index, label in enumerate(labels)}
        changes["label2id"] = {label: index for index, label in enumerate(labels)}
    config = source.config | changes
    return replace(source, config=config, texts=source.texts | {CONFIG: json_bytes(config)})

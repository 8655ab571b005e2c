"""LoRA adapters in files as the library PEFT writes them: a config and one file of safetensors."""

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from pydantic import BaseModel, Field

from ..config import Count, Flag, GPTModelConfig, LoraConfig, Positive
from ..errors import RecipeError, refused
from ._folder import read_json, refuse_pickles
from ._lora import layer_at, linears, updated_tensors
from ._names import Tensor, full_name
from ._schema import known_only, validated
from ._tensors import make_header, read_tensors, write_tensors
from .plain import GPT

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# Keys that say how an adapter was made, not what it computes.
_INERT = {
    *(
        "task_type",
        "auto_mapping",
        "base_model_name_or_path",
        "peft_version",
        "revision",
        "inference_mode",
    ),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "fan_in_fan_out", "megatron_core", "loftq_config", "eva_config"),
    *("runtime_config", "qalora_group_size"),
}


class _File(BaseModel):
    peft_type: Literal["LORA"]
    r: Count
    lora_alpha: Positive
    use_rslora: Flag = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: Annotated[dict[str, float], Field(max_length=0)] | None = None
    bias: Literal["none"] = "none"
    # Others change the weights that the adapter is added to.
    init_lora_weights: Literal[True, False, "gaussian", "orthogonal", "eva"] = True


class Update(NamedTuple):
    """a (in, rank) and b (rank, out) of one tensor, float32: it becomes W + scale * a b."""

    a: np.ndarray
    b: np.ndarray
    scale: float


def save_adapter(model: GPT, lora: LoraConfig, folder: Path, base: str) -> None:
    """Writes the updates of a model that `adapt` has changed.

    Args:
      model: The model.
      lora: As `adapt` was given it.
      folder: Where to write.
      base: The folder of the model that is updated, for `base_model_name_or_path`.
    """
    updated = updated_tensors(model.config, lora)
    tensors = {}
    for name, tensor in updated.items():
        layers = [layer_at(model, path) for path in tensor.paths]
        b = np.concatenate([np.asarray(layer.lora_b.get_value()) for layer in layers], axis=-1)
        for letter, value in (("A", np.asarray(layers[0].lora_a.get_value())), ("B", b)):
            stored = np.ascontiguousarray(value.T, np.float32)
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = stored
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": _modules(model.config, updated.keys()),
        "fan_in_fan_out": not all(tensor.transposed for tensor in updated.values()),
        "bias": "none",
        "use_rslora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    with refused(f"cannot write {folder}", "give a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / WEIGHTS, make_header(tensors), tensors)
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", "utf-8")


def _modules(shape: GPTModelConfig, updated: Any) -> list[str]:
    """The ends of names by which PEFT finds the layers: the shortest that no other layer has."""
    others = linears(shape).keys() - updated
    ends = set()
    for name in updated:
        parts = name.split(".")
        own = parts[-1]
        ambiguous = any(other.endswith(f".{own}") for other in others)
        ends.add(".".join(parts[-2:]) if ambiguous else own)
    return sorted(ends)


def merge_adapter(model: GPT, folder: str | Path) -> None:
    """Adds the updates of a folder to a model's kernels, in place."""
    for name, update in read_adapter(folder, model).items():
        change = update.scale * (update.a @ update.b)
        for path, piece in _pieces(linears(model.config)[name], change).items():
            kernel = layer_at(model, path).kernel
            value = kernel.get_value()
            kernel.set_value((value.astype(jnp.float32) + piece).astype(value.dtype))


def start_from(model: GPT, lora: LoraConfig, folder: str | Path) -> None:
    """Sets the updates of a model that `adapt` has changed to those of a folder.

    Raises:
      RecipeError: As `read_adapter`, or rank, alpha or layers are not those of `lora`.
    """
    updates, updated = read_adapter(folder, model), updated_tensors(model.config, lora)
    if odd := sorted(updates.keys() ^ updated.keys()):
        raise RecipeError(
            f"lora.targets: expected those of lora.init {folder}; got {', '.join(lora.targets)}, "
            f"and {'no ' if odd[0] in updated else ''}{odd[0]} in {WEIGHTS}; correct lora.targets"
        )
    for name, (a, b, scale) in updates.items():
        rank = a.shape[1]
        for key, wanted, got in (("rank", rank, lora.rank), ("alpha", scale * rank, lora.alpha)):
            if wanted != got:
                raise RecipeError(
                    f"lora.{key}: expected {wanted:g}, that of {name} in lora.init {folder}; got "
                    f"{got:g}; set lora.{key}={wanted:g}"
                )
        for path, piece in _pieces(updated[name], b).items():
            layer = layer_at(model, path)
            layer.lora_a.set_value(jnp.asarray(a))
            layer.lora_b.set_value(jnp.asarray(piece))


def _pieces(tensor: Tensor, whole: np.ndarray) -> dict[str, np.ndarray]:
    """The part of each kernel in (..., out), whose last axis has the outputs of all of them."""
    return tensor._replace(transposed=False).unpack(whole)


def read_adapter(folder: str | Path, model: GPT) -> dict[str, Update]:
    """The updates of a folder, by the name of the tensor without `.weight`.

    Raises:
      RecipeError: A file is missing or damaged, the weights are a pickle, or the adapter is of
        other layers, of other sizes, or of a variant of LoRA that is not supported.
    """
    path, shape = Path(folder), model.config
    if not path.is_dir():
        raise RecipeError(
            f"{path}: expected the folder of an adapter; got "
            f"{'a file' if path.exists() else 'nothing'}; name the folder that has {CONFIG}"
        )
    if not (path / CONFIG).is_file():
        near = next((f" such as {file.parent}" for file in path.glob(f"*/{CONFIG}")), "")
        raise RecipeError(
            f"{path}: expected the folder of an adapter; got one without {CONFIG}; name the folder "
            f"that has it{near}"
        )
    given = read_json(path / CONFIG)
    known_only(given, _File, path, _INERT, file=CONFIG)
    config = validated(_File, given, path, file=CONFIG)
    if not (path / WEIGHTS).is_file():
        refuse_pickles(path, WEIGHTS, "peft's PeftModel.from_pretrained(...)")
        raise RecipeError(f"{path}: expected {WEIGHTS}; got no such file; copy the whole folder")
    _, tensors = read_tensors(path / WEIGHTS)
    known, kind = linears(shape), "gpt2" if shape.decoder is None else "llama"
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, array in tensors.items():
        match = _NAME.fullmatch(name)
        layer = full_name(match[1], kind) if match else ""
        if match is None or layer not in known:
            raise RecipeError(
                f"{path / WEIGHTS}: expected lora_A and lora_B of linear layers of the model, such "
                f"as {next(iter(known))}; got {name}; give an adapter of such layers of this model"
            )
        parts.setdefault(layer, {})[match[2]] = np.asarray(array, np.float32).T
    updates = {}
    for layer, pair in parts.items():
        if len(pair) < 2:
            raise RecipeError(
                f"{path / WEIGHTS}: expected lora_A and lora_B of {layer}; got lora_{min(pair)} "
                "alone; copy the file again"
            )
        a, b = pair["A"], pair["B"]
        kernels = [layer_at(model, p).kernel.get_value().shape for p in known[layer].paths]
        inputs, outputs = kernels[0][0], sum(shape[1] for shape in kernels)
        rank = a.shape[-1] if config.rank_pattern else config.r
        if (a.shape, b.shape) != ((inputs, rank), (rank, outputs)):
            raise RecipeError(
                f"{path / WEIGHTS}: expected {layer} with lora_A {[rank, inputs]} and lora_B "
                f"{[outputs, rank]}, by {CONFIG} and the model; got {[*a.T.shape]} and "
                f"{[*b.T.shape]}; give an adapter of this model, with its own {CONFIG}"
            )
        scale = config.lora_alpha / (rank**0.5 if config.use_rslora else rank)
        updates[layer] = Update(a, b, scale)
    return updates

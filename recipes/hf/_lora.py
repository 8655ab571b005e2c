"""Low-rank updates (LoRA) of a plain decoder, and adapter files in PEFT's format.

Each tensor of the files has one update. GPT-2's query, key and value are in one tensor, so their
updates share `lora_a`.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from pydantic import BaseModel, Field

from unitscale import ScaledArray, rescale, to_array
from unitscale.core import is_scaled
from unitscale.quant import Block, Dynamic, quantize

from ..config import Count, Flag, GPTModelConfig, LoraConfig, Positive
from ..errors import RecipeError, refused
from ._config import validated
from ._folder import json_bytes, read_config, read_tensors, write_tensors
from ._names import Table, full_name, table_of
from .plain import GPT

FLOAT4 = "float4_e2m1fn"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LINEARS = (
    *(f"attention.{name}" for name in ("query", "key", "value", "out")),
    *(f"mlp.{name}" for name in ("gate", "up", "down")),
)


class Frozen(nnx.Variable):
    """A frozen weight. As it is not an `nnx.Param`, it has no gradient and no optimizer state."""


class NarrowLinear(nnx.Module):
    """A linear layer with a kernel in 8 or 4 bits.

    An FP8 kernel keeps the scales of the file it came from, or has one scale per output. An E2M1
    kernel has an E4M3 scale per block of 16 inputs, and a power of two per layer.
    """

    def __init__(self, layer: nnx.Linear, dtype: str):
        self.dtype = layer.dtype
        kernel, scale = layer.kernel.get_value(), None
        if not (is_scaled(kernel) and kernel.dtype == dtype):
            wide = jnp.asarray(to_array(kernel), jnp.float32)
            if dtype == FLOAT4:
                unit = rescale(wide, "amax", dtype="float8_e4m3fn")  # block scales far from 0
                scale = Frozen(unit.scale)
                kernel = quantize(unit.data, dtype, Block(16, scale_format="e4m3fn"), axis=0)
            else:
                kernel = quantize(wide, dtype, Dynamic("channel"), axis=0)
        self.kernel, self.scale = Frozen(kernel), scale
        self.bias = layer.bias

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = 1.0 if self.scale is None else self.scale.get_value()
        y = _widened_matmul(x.astype(self.dtype), self.kernel.get_value(), scale)
        return y if self.bias is None else y + self.bias.get_value().astype(y.dtype)


class NarrowEmbed(nnx.Module):
    """An embedding table in E4M3, with a scale per token; also a tied readout."""

    def __init__(self, layer: nnx.Embed):
        wide = jnp.asarray(layer.embedding.get_value(), jnp.float32)
        self.dtype = layer.dtype
        self.embedding = Frozen(quantize(wide, "float8_e4m3fn", Dynamic("channel"), axis=1))

    def __call__(self, ids: jax.Array) -> jax.Array:
        rows = jax.tree.map(lambda x: x[ids], self.embedding.get_value())
        return rows.value.astype(self.dtype)

    def attend(self, x: jax.Array) -> jax.Array:
        return _widened_matmul(x.astype(self.dtype), self.embedding.get_value().T)


@jax.checkpoint  # cast the kernel again in the backward pass instead of keeping a wide copy
def _widened_matmul(x: jax.Array, kernel: ScaledArray, scale: Any = 1.0) -> jax.Array:
    return x @ (kernel.value * scale).astype(x.dtype)


class UpdatedLinear(nnx.Module):
    """A linear layer with a low-rank update: base(x) + scale * x a b.

    References:
      Hu et al., 2021, LoRA.
    """

    def __init__(self, base: Any, lora_a: nnx.Param, lora_b: nnx.Param, scale: float):
        self.base, self.lora_a, self.lora_b, self.scale = base, lora_a, lora_b, scale

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.base(x)
        a, b = (part.get_value().astype(y.dtype) for part in (self.lora_a, self.lora_b))
        return y + self.scale * (x.astype(y.dtype) @ a @ b)

    @property
    def kernel(self) -> nnx.Variable:
        """The frozen kernel."""
        return self.base.kernel


def adapt(model: GPT, lora: LoraConfig, *, frozen: str | None = None, seed: int = 0) -> None:
    """Freeze a model's weights and add low-rank updates to the layers of `lora.targets`, in place.

    b starts at zero, and a uniform within +-1 / sqrt(in). Frozen matrices get the model's dtype (in
    linear layers the dtype `frozen`, if given), vectors float32. In a base in 4 bits, embeddings
    and readout are in E4M3.
    """
    updated = updated_tensors(model.config, lora)
    if frozen == FLOAT4:
        parts: Any = model
        parts.embed = NarrowEmbed(model.embed)
        if model.readout is not None:
            parts.readout = NarrowLinear(model.readout, "float8_e4m3fn")
    for layer in model.layers if frozen is not None else ():
        for part in (layer.attention, layer.mlp):
            for name, child in list(vars(part).items()):
                if isinstance(child, nnx.Linear):
                    setattr(part, name, NarrowLinear(child, str(frozen)))
    for _, module in nnx.iter_modules(model):
        for name, variable in list(vars(module).items()):
            if isinstance(variable, nnx.Param):
                value = variable.get_value()
                dtype = model.dtype if len(value.shape) > 1 else jnp.float32
                setattr(module, name, Frozen(jnp.asarray(value, dtype)))
    rngs = nnx.Rngs(seed)
    for tensor in updated.values():
        inputs = _layer(model, tensor.paths[0]).kernel.get_value().shape[0]
        bound, shape = inputs**-0.5, (inputs, lora.rank)
        lora_a = nnx.LoRAParam(jax.random.uniform(rngs(), shape, minval=-bound, maxval=bound))
        for path in tensor.paths:
            owner, name = _place(model, path)
            base = getattr(owner, name)
            lora_b = nnx.LoRAParam(jnp.zeros((lora.rank, base.kernel.get_value().shape[1])))
            setattr(owner, name, UpdatedLinear(base, lora_a, lora_b, lora.scale))


def _place(model: GPT, path: str) -> tuple[Any, str]:
    """Return the parent module and the name of the layer that holds a kernel."""
    _, index, part, name, _ = path.split(".")
    return getattr(model.layers[int(index)], part), name


def _layer(model: GPT, path: str) -> Any:
    return getattr(*_place(model, path))


def _kind(shape: GPTModelConfig) -> str:
    return "gpt2" if shape.positions == "learned" else "llama"


def _linears(shape: GPTModelConfig) -> Table:
    """Return the tensors of all linear layers' kernels, by name without `.weight`."""
    kernels = [f"layers.{i}.{name}.kernel" for i in range(shape.layers) for name in _LINEARS]
    table = table_of(_kind(shape), "lm", kernels)
    by_layer = sorted(table, key=lambda name: int(table[name].paths[0].split(".")[1]))
    return {name.removesuffix(".weight"): table[name] for name in by_layer}


def updated_tensors(shape: GPTModelConfig, lora: LoraConfig) -> Table:
    """Return the tensors of `lora.targets`; raise an error if a tensor has other layers too."""
    got, known, chosen = ", ".join(lora.targets), set[str](), {}
    for name, tensor in _linears(shape).items():
        own = {path.split(".")[-2]: None for path in tensor.paths}
        known |= own.keys()
        if own.keys() <= {*lora.targets}:
            chosen[name] = tensor
        elif own.keys() & {*lora.targets}:
            raise RecipeError(
                f"lora.targets: expected all of {', '.join(own)} or none, as they are in one "
                f"tensor, {name}; got {got}; add the others"
            )
    if {*lora.targets} - known:
        raise RecipeError(f"lora.targets: expected some of {', '.join(sorted(known))}; got {got}")
    return chosen


class _File(BaseModel):
    peft_type: Literal["LORA"]
    r: Count
    lora_alpha: Positive
    use_rslora: Flag = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: Annotated[dict[str, float], Field(max_length=0)] | None = None
    bias: Literal["none"] = "none"
    # Other initializations change the weights to which the adapter is added.
    init_lora_weights: Literal[True, False, "gaussian", "orthogonal", "eva"] = True


# Keys that describe how an adapter was made, and do not change what it computes.
_INERT = re.compile(
    r"task_type|auto_mapping|base_model_name_or_path|peft_version|revision|inference_mode|"
    r"(target|exclude)_modules|layers_.*|lora_dropout|fan_in_fan_out|megatron_core|"
    r"(loftq|eva|runtime)_config|qalora_group_size"
)


def save_adapter(model: GPT, lora: LoraConfig, folder: Path, base: str) -> None:
    """Write the updates of an adapted model; `base` is the Hugging Face folder it came from."""
    updated = updated_tensors(model.config, lora)
    cached = re.search("models--([^/]+)/snapshots/", base)  # in the cache of huggingface_hub
    tensors = {}
    for name, tensor in updated.items():
        layers = [_layer(model, path) for path in tensor.paths]
        b = np.concatenate([np.asarray(layer.lora_b.get_value()) for layer in layers], axis=-1)
        for letter, value in (("A", np.asarray(layers[0].lora_a.get_value())), ("B", b)):
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = value.T.astype(np.float32)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": cached[1].replace("--", "/") if cached else base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        # Two parts of a name, because GPT-2 has a c_proj both in attention and in the MLP.
        "target_modules": sorted({".".join(name.split(".")[-2:]) for name in updated}),
        "fan_in_fan_out": not all(tensor.transposed for tensor in updated.values()),
        "inference_mode": True,
    }
    with refused(f"cannot write {folder}", "give a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
        (folder / CONFIG).write_bytes(json_bytes(config))


def merge_adapter(model: GPT, folder: str | Path) -> None:
    """Add the updates in an adapter's folder to a model's kernels, in place."""
    for name, (a, b, scale) in _read_adapter(Path(folder), model).items():
        for path, piece in _linears(model.config)[name].split(scale * (a @ b)).items():
            kernel = _layer(model, path).kernel
            value = kernel.get_value()
            kernel.set_value((jnp.asarray(value, jnp.float32) + piece).astype(value.dtype))


def start_from(model: GPT, lora: LoraConfig, folder: str | Path) -> None:
    """Set the updates of an adapted model to those in a folder, which must match `lora`."""
    updates, updated = _read_adapter(Path(folder), model), updated_tensors(model.config, lora)
    found = {(a.shape[1], scale * a.shape[1]) for a, _, scale in updates.values()}
    if updates.keys() != updated.keys() or found != {(lora.rank, lora.alpha)}:
        names = ", ".join(sorted({name.split(".")[-1] for name in updates}))
        raise RecipeError(
            f"lora: expected the targets, rank and alpha of lora.init {folder}, {names} with "
            f"{sorted(found)}; got {', '.join(lora.targets)} with {(lora.rank, lora.alpha)}"
        )
    for name, (a, b, _) in updates.items():
        for path, piece in updated[name].split(b).items():
            layer = _layer(model, path)
            layer.lora_a.set_value(jnp.asarray(a))
            layer.lora_b.set_value(jnp.asarray(piece))


def _read_adapter(folder: Path, model: GPT) -> dict[str, tuple[np.ndarray, np.ndarray, float]]:
    """Read a (in, rank), b (rank, out) and the factor of each update, by name as in `_linears`."""
    given = read_config(folder, CONFIG, "LoRA adapter")
    config = validated(_File, given, folder, inert=_INERT, file=CONFIG)
    known, parts = _linears(model.config), {}
    for name, array in read_tensors(folder / WEIGHTS)[1].items():
        stem, _, part = name.removesuffix(".weight").rpartition(".lora_")
        layer = full_name(stem.removeprefix("base_model.model."), _kind(model.config))
        if layer not in known or part not in ("A", "B"):
            raise RecipeError(
                f"{folder / WEIGHTS}: expected lora_A and lora_B of linear layers of the model, "
                f"such as {next(iter(known))}; got {name}; give an adapter of this model"
            )
        parts.setdefault(layer, {})[part] = np.asarray(array, np.float32).T
    updates = {}
    for layer, pair in parts.items():
        kernels = [_layer(model, path).kernel.get_value().shape for path in known[layer].paths]
        inputs, outputs = kernels[0][0], sum(kernel[1] for kernel in kernels)
        rank = pair["A"].shape[-1] if config.rank_pattern and "A" in pair else config.r
        wanted = {"A": (inputs, rank), "B": (rank, outputs)}
        if (found := {part: array.shape for part, array in pair.items()}) != wanted:
            raise RecipeError(
                f"{folder / WEIGHTS}: expected {layer} with transposed lora_A and lora_B of "
                f"{wanted}, by {CONFIG} and the model; got {found}; give an adapter of this model"
            )
        scale = config.lora_alpha / (rank**0.5 if config.use_rslora else rank)
        updates[layer] = pair["A"], pair["B"], scale
    return updates

"""Low-rank updates of a plain decoder: its own weights are frozen, in FP8 if asked for.

An update is of one tensor of the folder's files, as PEFT has it: GPT-2's query, key and value are
one tensor, so that they share the first product.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from unitscale import ScaledArray
from unitscale.quant import Dynamic, quantize

from ..config import GPTModelConfig, LoraConfig
from ..errors import RecipeError
from ._names import Table, table_of
from .plain import GPT

_KERNEL = re.compile(r"layers\.\d+\.(?:attention|mlp)\.(\w+)\.kernel")


class Frozen(nnx.Variable):
    """A weight that is not trained: no `nnx.Param`, so no gradient and no optimizer state."""


class NarrowLinear(nnx.Module):
    """A linear layer whose kernel is kept in FP8 with a power-of-two scale for each output.

    The kernel is widened where it is multiplied, and again in the backward pass, so that no wide
    copy of it is kept.
    """

    def __init__(self, layer: nnx.Linear, dtype: str):
        self.dtype = layer.dtype
        kernel = jnp.asarray(layer.kernel.get_value(), jnp.float32)
        self.kernel = Frozen(quantize(kernel, dtype, Dynamic("channel"), axis=0))
        self.bias = layer.bias

    def __call__(self, x: jax.Array) -> jax.Array:
        y = _multiplied(x.astype(self.dtype), self.kernel.get_value())
        return y if self.bias is None else y + self.bias.get_value().astype(y.dtype)


@jax.checkpoint
def _multiplied(x: jax.Array, kernel: ScaledArray) -> jax.Array:
    return x @ kernel.value.astype(x.dtype)


class UpdatedLinear(nnx.Module):
    """base(x) + scale * x a b, with a (in, rank) and b (rank, out).

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
        """Of the layer that is updated."""
        return self.base.kernel


def adapt(model: GPT, lora: LoraConfig, *, seed: int = 0) -> None:
    """Freezes a model's weights and gives the layers of `lora.targets` an update, in place.

    The function stays that of the frozen weights: b is zero, and a uniform within 1 / sqrt(in).
    Frozen matrices take the model's dtype, or linear layers that of `lora.base`; vectors are
    float32.

    Raises:
      RecipeError: The model has no such layers, or only some of those of one tensor are named.
    """
    updated = updated_tensors(model.config, lora)
    for layer in model.layers if lora.base is not None else ():
        for part in (layer.attention, layer.mlp):
            for name, child in list(vars(part).items()):
                if isinstance(child, nnx.Linear):
                    setattr(part, name, NarrowLinear(child, str(lora.base)))
    _freeze(model)
    rngs = nnx.Rngs(seed)
    for tensor in updated.values():
        places = [_place(model, path) for path in tensor.paths]
        inputs = getattr(*places[0]).kernel.get_value().shape[0]
        bound = inputs**-0.5
        shape = (inputs, lora.rank)
        lora_a = nnx.LoRAParam(jax.random.uniform(rngs(), shape, minval=-bound, maxval=bound))
        for parent, name in places:
            base = getattr(parent, name)
            lora_b = nnx.LoRAParam(jnp.zeros((lora.rank, base.kernel.get_value().shape[1])))
            setattr(parent, name, UpdatedLinear(base, lora_a, lora_b, lora.scale))


def _freeze(model: GPT) -> None:
    for _, module in nnx.iter_modules(model):
        for name, variable in list(vars(module).items()):
            if isinstance(variable, nnx.Param):
                value = variable.get_value()
                dtype = model.dtype if value.ndim > 1 else jnp.float32
                setattr(module, name, Frozen(jnp.asarray(value, dtype)))


def linears(shape: GPTModelConfig) -> Table:
    """The tensors that may be updated: those of the layers' kernels, without `.weight`."""
    table = table_of("gpt2" if shape.decoder is None else "llama", shape, "lm")
    return {
        name.removesuffix(".weight"): tensor
        for name, tensor in table.items()
        if all(_KERNEL.fullmatch(path) for path in tensor.paths)
    }


def updated_tensors(shape: GPTModelConfig, lora: LoraConfig) -> Table:
    """The tensors that hold the layers of `lora.targets`."""
    wanted, known, chosen = set(lora.targets), set[str](), {}
    for name, tensor in linears(shape).items():
        own = [path.split(".")[-2] for path in tensor.paths]
        known |= set(own)
        if wanted.isdisjoint(own):
            continue
        if not wanted.issuperset(own):
            raise RecipeError(
                f"lora.targets: expected all of {', '.join(own)} or none, as {name} is one tensor "
                f"of them; got {', '.join(lora.targets)}; add the others"
            )
        chosen[name] = tensor
    if wanted - known:
        raise RecipeError(
            f"lora.targets: expected some of {', '.join(sorted(known))}, which the model has; got "
            f"{', '.join(lora.targets)}; remove {', '.join(sorted(wanted - known))}"
        )
    return chosen


def layer_at(model: GPT, path: str) -> Any:
    """The layer that holds a kernel."""
    return getattr(*_place(model, path))


def _place(model: GPT, path: str) -> tuple[Any, str]:
    """What holds the layer of a kernel, and the layer's name in it."""
    *parts, name, _ = path.split(".")
    owner: Any = model
    for part in parts:
        owner = owner[int(part)] if part.isdecimal() else getattr(owner, part)
    return owner, name

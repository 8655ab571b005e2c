"""Constructors beside those of `flax.nnx`, for documentation.

The rows are read from the signatures, so that a page cannot fall behind either library.
"""

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import flax
from flax import nnx

from ._attention import MultiHeadAttention
from ._conv import Conv, ConvTranspose
from ._dropout import Dropout
from ._einsum import Einsum
from ._embed import Embed
from ._linear import Dense
from ._lora import LoRA, LoRALinear
from ._norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from ._optimizer import Optimizer
from ._param import unit_normal
from ._recurrent import GRUCell, OptimizedLSTMCell, SimpleCell
from ._rnn import RNN

TWINS: dict[type, type] = {
    Dense: nnx.Linear,
    Einsum: nnx.Einsum,
    LoRA: nnx.LoRA,
    LoRALinear: nnx.LoRALinear,
    Conv: nnx.Conv,
    ConvTranspose: nnx.ConvTranspose,
    Embed: nnx.Embed,
    LayerNorm: nnx.LayerNorm,
    RMSNorm: nnx.RMSNorm,
    GroupNorm: nnx.GroupNorm,
    BatchNorm: nnx.BatchNorm,
    Dropout: nnx.Dropout,
    MultiHeadAttention: nnx.MultiHeadAttention,
    SimpleCell: nnx.SimpleCell,
    GRUCell: nnx.GRUCell,
    OptimizedLSTMCell: nnx.OptimizedLSTMCell,
    RNN: nnx.RNN,
    Optimizer: nnx.Optimizer,
}
"""The class of `flax.nnx` that each class is compared with."""

MISSING: dict[str, str] = {
    "Bidirectional": "that of `flax.nnx` takes two `RNN` of this package",
    "InstanceNorm": "`GroupNorm(features, features)` is the same function",
    "LSTMCell": "`OptimizedLSTMCell` is the same function",
    "LinearGeneral": "`Einsum`, or a reshape around `Dense`",
    "PReLU": "`ops.elementwise` takes any activation that has no parameter",
    "RoPE": "`MultiHeadAttention(rotary_base=)`, `ops.rotary`",
    "SpectralNorm": "it changes the variance of a weight, which factors count on",
    "WeightNorm": "it changes the variance of a weight, which factors count on",
}
"""Layers of `flax.nnx` that have no twin, and why."""

_FORMATS = "formats of products come from `policy`"
_OUR_AXES = "always the last axis"
_WHOLE = "under `jit` the whole array is seen, however it is divided"
_NO_STATE = "cells here draw nothing and have no state that changes"

REASONS: dict[str, str] = {
    # here alone
    "policy": "formats of parameters, activations and products by one name",
    "constraint": "how the output and the input gradient come to share a factor",
    "pad_to_multiple_of": "a vocabulary of a size that matrix kernels like",
    "is_causal": "the factor depends on how many keys a query sees",
    "max_length": "the factor depends on how many keys a query sees",
    "rotary_base": "rotary positions",
    "mult": "multiplier of the logits, which u-μP tunes",
    "context": "the factor can count what tokens share",
    "stack_axes": "layers that `nnx.vmap` has stacked have scales of their own",
    "implementation": "which program computes it; stands for `attention_fn`",
    # in flax alone
    "precision": _FORMATS,
    "preferred_element_type": _FORMATS,
    "promote_dtype": _FORMATS,
    "lora_promote_dtype": _FORMATS,
    "einsum_op": _FORMATS,
    "qkv_promote_dtype": _FORMATS,
    "out_promote_dtype": _FORMATS,
    "ln_promote_dtype": _FORMATS,
    "dot_general": _FORMATS,
    "qkv_dot_general": _FORMATS,
    "out_dot_general": _FORMATS,
    "qkv_dot_general_cls": _FORMATS,
    "out_dot_general_cls": _FORMATS,
    "conv_general_dilated": _FORMATS,
    "transpose_kernel": "kernels that come from elsewhere are flipped and their axes swapped once",
    "mask": "a masked kernel sums fewer terms than the factor counts",
    "axis": _OUR_AXES,
    "GroupNorm.reduction_axes": "always all but the first",
    "reduction_axes": _OUR_AXES,
    "feature_axes": _OUR_AXES,
    "axis_name": _WHOLE,
    "axis_index_groups": _WHOLE,
    "use_fast_variance": "the variance is always that of the centred input",
    "broadcast_dropout": "each attention weight is dropped by itself",
    "attention_fn": "another function has other factors",
    "decode": "`init_cache` and `decode` take and return the cache",
    "normalize_qk": "queries and keys are unit at initialisation",
    "query_ln_scale_metadata": "goes with `normalize_qk`",
    "key_ln_scale_metadata": "goes with `normalize_qk`",
    "keep_rngs": "deprecated in flax",
    "carry_init": "deprecated in flax; `RNN` takes an `initial_carry`",
    "gate_fn": "the state's unit is solved for the logistic function",
    "activation_fn": "the state's unit is solved for tanh",
    "state_axes": _NO_STATE,
    "broadcast_rngs": _NO_STATE,
    "RNN.rngs": _NO_STATE,
    # other defaults
    "SimpleCell.dtype": "None is that of the policy, float32 by default",
    "param_dtype": "None is that of the policy, float32 by default",
    "lora_param_dtype": "None is that of the layer",
    "a_initializer": "unit variance; the factor stands for the fan-in",
    "kernel_init": "unit variance; the factor stands for the fan-in",
    "recurrent_kernel_init": "unit variance; the factor stands for the fan-in",
    "embedding_init": "unit variance",
    "LayerNorm.rngs": "ones and zeros need no key",
    "RMSNorm.rngs": "ones and zeros need no key",
    "GroupNorm.rngs": "ones and zeros need no key",
    "BatchNorm.rngs": "ones and zeros need no key",
    "MultiHeadAttention.deterministic": "as that of `Dropout`",
    "Optimizer.graph": "the mode that `flax.nnx` is set to",
}
"""Why an argument differs: by its name, or by class and name."""


class Argument(NamedTuple):
    """One argument of a constructor and of its twin's; None where one lacks it."""

    name: str
    ours: inspect.Parameter | None
    flax: inspect.Parameter | None

    @property
    def same(self) -> bool:
        """Whether both have it, with the same default."""
        ours, flax = self.ours, self.flax
        return ours is not None and flax is not None and ours.default == flax.default


def arguments(cls: type) -> list[Argument]:
    """Returns the arguments of a class and of its twin, each once, in the twin's order first."""
    ours, flax = parameters(cls), parameters(TWINS[cls])
    return [Argument(name, ours.get(name), flax.get(name)) for name in flax | ours]


def parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a constructor; a module's own signature hides behind its type's."""
    given = list(inspect.signature(cls.__init__).parameters.values())[1:]
    found = {p.name: p for p in given if p.kind is not p.VAR_KEYWORD}
    if len(found) < len(given):  # the base class takes the rest
        found |= {name: p for name, p in parameters(cls.__bases__[0]).items() if name not in found}
    return found


def reason(cls: type, name: str) -> str:
    """Returns why an argument differs; "" where nobody has said."""
    return REASONS.get(f"{cls.__name__}.{name}", REASONS.get(name, ""))


def flax_page() -> str:
    """Returns a page of Markdown: each constructor beside its twin's.

    Example:
        >>> print(flax_page().splitlines()[0])
        # Layers beside flax.nnx
    """
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Layers beside flax.nnx"
    yield ""
    yield f"Made by `python -m unitscale.nn` from the signatures, with Flax {flax.__version__}:"
    yield "what a constructor of `unitscale.nn` shares with its twin, then every argument that"
    yield "differs, and why. Shared arguments have the same order and are positional in both or"
    yield "in neither."
    yield ""
    yield "Factors count on parameters of unit variance at initialisation. An initializer of"
    yield "another is taken as it is: activations and gradients are larger or smaller by it."
    for cls, twin in TWINS.items():
        rows = arguments(cls)
        yield ""
        yield f"## `nn.{cls.__name__}` and `nnx.{twin.__name__}`"
        yield ""
        same = [_argument(row.name, row.ours) for row in rows if row.same]
        yield f"The same: {', '.join(same)}."
        others = [row for row in rows if not row.same]
        if others:
            yield ""
            yield "| argument | here | `flax.nnx` | why |"
            yield "|---|---|---|---|"
        for row in others:
            cells = f"`{row.name}`", _default(row.ours), _default(row.flax), reason(cls, row.name)
            yield f"| {' | '.join(cells)} |"
    yield ""
    yield "## In flax.nnx alone"
    yield ""
    yield "| layer | instead |"
    yield "|---|---|"
    for name, instead in MISSING.items():
        yield f"| `nnx.{name}` | {instead} |"


def _argument(name: str, parameter: inspect.Parameter | None) -> str:
    if parameter is None or parameter.default is parameter.empty:
        return f"`{name}`"
    return f"`{name}={_shown(parameter.default)}`"


def _default(parameter: inspect.Parameter | None) -> str:
    if parameter is None:
        return "—"
    return "required" if parameter.default is parameter.empty else f"`{_shown(parameter.default)}`"


def _shown(default: Any) -> str:
    if default is unit_normal:
        return "normal(1.0)"
    if callable(default):
        return getattr(default, "__qualname__", default.__name__).split(".")[0]
    return "{}" if default == {} else repr(default)

"""Constructors have the argument names and order of their counterparts in flax.nnx."""

import inspect
from typing import get_args

import pytest
from flax import nnx

from unitscale import nn

TWINS = {
    nn.Dense: nnx.Linear,
    nn.Einsum: nnx.Einsum,
    nn.LoRA: nnx.LoRA,
    nn.LoRALinear: nnx.LoRALinear,
    nn.Conv: nnx.Conv,
    nn.ConvTranspose: nnx.ConvTranspose,
    nn.Embed: nnx.Embed,
    nn.LayerNorm: nnx.LayerNorm,
    nn.RMSNorm: nnx.RMSNorm,
    nn.GroupNorm: nnx.GroupNorm,
    nn.BatchNorm: nnx.BatchNorm,
    nn.Dropout: nnx.Dropout,
    nn.MultiHeadAttention: nnx.MultiHeadAttention,
    nn.SimpleCell: nnx.SimpleCell,
    nn.GRUCell: nnx.GRUCell,
    nn.OptimizedLSTMCell: nnx.OptimizedLSTMCell,
    nn.RNN: nnx.RNN,
    nn.Optimizer: nnx.Optimizer,
}
OURS = {"policy", "constraint", "pad_to_multiple_of", "is_causal", "max_length", "rotary_base"}
OURS |= {"mult", "implementation", "stack_axes", "kernel_metadata", "recurrent_kernel_metadata"}
OURS |= {"bias_metadata", "dtype", "param_dtype"}
# "Differences from flax.nnx" in the documentation says why.
FLAX_ONLY = {
    *("precision", "preferred_element_type", "dot_general", "einsum_op", "conv_general_dilated"),
    *("promote_dtype", "lora_promote_dtype", "qkv_promote_dtype", "out_promote_dtype"),
    *("ln_promote_dtype", "qkv_dot_general", "out_dot_general", "qkv_dot_general_cls"),
    *("out_dot_general_cls", "transpose_kernel", "mask", "axis", "reduction_axes", "feature_axes"),
    *("axis_name", "axis_index_groups", "use_fast_variance", "attention_fn", "normalize_qk"),
    *("query_ln_scale_metadata", "key_ln_scale_metadata", "carry_init", "gate_fn"),
    *("activation_fn", "state_axes", "broadcast_rngs", "rngs", "keep_rngs", "graph"),
}


def arguments(cls: type) -> tuple[list[str], set[str]]:
    """Positional arguments in order, and keywords, with those that a base class takes."""
    positional, keywords = [], set()
    for name, argument in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        if argument.kind is argument.POSITIONAL_OR_KEYWORD:
            positional.append(name)
        elif argument.kind is not argument.VAR_KEYWORD:
            keywords.add(name)
        elif options := get_args(argument.annotation):
            keywords |= options[0].__annotations__.keys()
        else:
            keywords |= arguments(cls.__bases__[0])[1]
    return positional, keywords


@pytest.mark.parametrize("cls", TWINS, ids=lambda cls: cls.__name__)
def test_arguments_are_those_of_flax(cls: type) -> None:
    positional, keywords = arguments(cls)
    wanted, others = arguments(TWINS[cls])
    assert positional == wanted
    assert keywords - others <= OURS
    assert others - keywords <= FLAX_ONLY

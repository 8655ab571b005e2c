"""Errors of ops: type, and the name of the argument. Default arguments of ops and rules."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from unitscale import batch_size, ops, rules
from unitscale.core._compat import cudnn_of
from unitscale.parallel import make_mesh
from unitscale.quant import Delayed, MatmulConfig

x, w = jnp.ones((8, 32)), jnp.ones((32, 4))
image, kernel = jnp.ones((2, 6, 6, 4)), jnp.ones((3, 3, 4, 8))
three, four = jnp.ones((2, 3, 4)), jnp.ones((4, 5))
heads, three_heads = jnp.ones((1, 3, 2, 4)), jnp.ones((1, 3, 3, 4))
labels, logits = np.array([[0, 3, 1], [4, 4, 2]]), jnp.ones((2, 3, 5))
hidden, table = jnp.ones((2, 3, 6)), jnp.ones((6, 5))
down, up = jnp.ones((32, 3)), jnp.ones((3, 5))
groups = ops.Groups(jnp.array([3, 0, 2]), rows=8, groups=3)
experts = jnp.ones((3, 32, 4))
routing = ops.route(three, jnp.ones((4, 4)), 2)
key = jax.random.key(0)


def attend(*args: Any, **options: Any) -> Any:
    return ops.dot_product_attention(*args, **options)


def entropy(z: Any = logits, **options: Any) -> Any:
    return ops.softmax_cross_entropy(z, labels, **options)


def readout(a: Any = hidden, b: Any = table, **options: Any) -> Any:
    return ops.readout_cross_entropy(a, b, labels, **options)


def rows(fn: Any = lambda rows, params, groups: rows, count: int = 4, **options: Any) -> Any:
    return ops.mixture(fn, three, ops.route(three, jnp.ones((4, count)), 2), (), **options)


def on_a_mesh() -> Any:
    with jax.set_mesh(make_mesh({"expert": 2}, devices=jax.devices()[:2])):
        return rows(count=3)


def in_shard_map(spec: Any, **options: Any) -> Any:
    mesh = make_mesh({"expert": 2}, devices=jax.devices()[:2])

    def f(x: Any) -> Any:
        routing = ops.route(x, jnp.ones((4, 4)), 2)
        return ops.mixture(lambda rows, params, groups: rows, x, routing, ()).value

    run = jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, **options)
    return jax.eval_shape(run, three)


def under(size: Any) -> None:
    with batch_size(size):
        pass


VALUES = {
    "dense": [
        (lambda: ops.dense(x, jnp.ones((16, 64))), r"kernel must .* kernel \(16, 64\)"),
        (lambda: ops.dense(x, w.T), r"Transpose the kernel\?"),
        (lambda: ops.dense(x, w, jnp.ones(5)), r"bias must be .*; got bias \(5,\)"),
        (lambda: ops.dense(x, w, constraint="to_output_scal"), "mean 'to_output_scale'"),
    ],
    "matmul": [
        (lambda: ops.matmul(x, x), r"left must be \(\.\.\., m, k\)"),
        (lambda: ops.matmul(jnp.ones((2, 1, 1)), jnp.ones((3, 1, 1))), "leading dimensions"),
    ],
    "einsum": [
        (lambda: ops.einsum("abc,cd", three, four), "subscripts must be .*no ->"),
        (lambda: ops.einsum("abc,cd->ad", three, four), "'b' in one term only"),
        (lambda: ops.einsum("ab,bc->ac", three, four), "axes of 'ab,bc->ac'.*x .2, 3, 4"),
        (lambda: ops.einsum("abc,bd->acd", three, four), "must have the axes of"),
        (lambda: ops.einsum("abc,cd->abd", three, four, three[0]), r"bias must be \(5,\)"),
    ],
    "lora": [
        (lambda: ops.lora(x, up, down), r"x must be \(\.\.\., in\).*got x \(8"),
        (lambda: ops.lora(x, down, up, x), r"base must be \(\.\.\., out\); got .*base \(8, 32"),
    ],
    "grouped_dense": [
        (lambda: ops.grouped_dense(x, experts[:2], groups), r"kernel \(3, in, out\)"),
        (lambda: ops.grouped_dense(x[None], experts, groups), r"x must be \(rows, in\)"),
        (lambda: ops.grouped_dense(x, experts, groups, jnp.ones(4)), r"bias must be \(3, 4\)"),
    ],
    "embed": [
        (lambda: ops.embed(labels, table[0]), r"table must be \(vocab, features\); got table"),
        (lambda: ops.embed(labels, table, vocab=7), "vocab must be at most the 6 rows .* got 7"),
    ],
    "rotary": [
        (lambda: ops.rotary(heads[..., :3], np.arange(3)), "even d"),
        (lambda: ops.rotary(heads, np.arange(4)), "positions must broadcast"),
    ],
    "functions": [
        (lambda: ops.silu_glu(x, x[:1]), r"silu_glu: .*same shape.*\(8, 32\).*\(1, 32\)"),
        (lambda: ops.softmax(x, 2), r"axis must be in \[-2, 2\).*got 2"),
        (lambda: ops.dropout(x, 0.5), "key must be a jax.random key"),
        (lambda: ops.unit_scaled(jnp.cumsum, [x[0]], cut=[1]), r"cut must .* \[0\]; got \[1\]"),
        (lambda: ops.unit_scaled(jnp.cumsum, [x[0]], seeds=0), "ops.unit_scaled: seeds must be"),
    ],
    "norms": [
        (lambda: ops.layer_norm(x, x), r"gain must be \(features,\)"),
        (lambda: ops.rms_norm(x, eps=-1.0), "eps must not be negative"),
        (lambda: ops.rms_norm(x[0, 0]), r"rms_norm: x must be \(\.\.\., features\)"),
        (lambda: ops.layer_norm(x[0, 0]), r"layer_norm: x must be \(\.\.\., features\)"),
        (lambda: ops.batch_norm(x[0]), r"x must be \(\.\.\., features\)"),
        (lambda: ops.batch_norm(x, statistics=(x[0], x[0, :2])), "variance must be .*features"),
        (lambda: ops.group_norm(x, num_groups=3), "num_groups must divide .* got 3 groups"),
    ],
    "sums": [
        (lambda: ops.add(x, w), r"x and y must broadcast; got x \(8, 32\), y"),
        (lambda: ops.weighted_add(x, x, weights=(1,)), "weights must be two.*; got 1"),
        (lambda: ops.residual_add(x, x[:1], 1.0), "branch and skip"),
        (lambda: ops.fan_out(x, 0), "count must be at least 1; got 0"),
    ],
    "cells": [
        (lambda: ops.gated_update(x, x, x[:1]), r"gate \(1, 32\)"),
        (lambda: ops.lstm(x, x, x), r"x must be \(\.\.\., 4 \* features"),
        (lambda: ops.highway(x, x), r"h must be \(\.\.\., 2 \* feat"),
    ],
    "conv": [
        (lambda: ops.conv(image, kernel[0]), r"x must .* x \(2, 6, 6, 4\), kernel"),
        (lambda: ops.conv(image, kernel[:, :, :2]), "feature_group_count is 1"),
        (lambda: ops.conv(image, kernel, strides=(1, 2, 3)), "strides must be"),
        (lambda: ops.conv(image, kernel, padding="CAUSAL"), "padding must be .*got 'CAUSAL'"),
        (lambda: ops.conv(image, kernel, input_dilation=2), "got input_dilation .*transpose"),
        (lambda: ops.conv(image, kernel, jnp.ones(3)), "bias must .* got bias"),
        (lambda: ops.conv_transpose(image[0], kernel[0], padding="CAUSAL"), "conv_transpose: pad"),
    ],
    "pools": [
        (lambda: ops.avg_pool(image, (2,) * 4), r"avg_pool: x must be \(\.\.\., \*spatial, feat"),
        (lambda: ops.max_pool(image, (2, 0)), "window_shape must be a positive integer or 2"),
        (lambda: ops.avg_pool(image, (2, 2), None, "CAUSAL"), "padding must be .*got 'CAUSAL'"),
    ],
    "attention": [
        (lambda: attend(heads[0], heads, heads), r"q must be .*got q \(3, 2, 4\)"),
        (lambda: attend(heads, three_heads, three_heads), "kv_heads dividing heads"),
        (lambda: attend(*[heads] * 3, mask=jnp.ones((3, 4), bool)), r"\(1, 2, 3, 3\); got mask"),
        (lambda: attend(*[heads] * 3, dropout_rate=0.1, deterministic=False), "dropout_key"),
        (lambda: attend(*[heads] * 3, local_window_size=(1,)), r"local_window_size .* got \(1,\)"),
        (lambda: attend(*[heads] * 3, local_window_size=-1), "local_window_size"),
        (lambda: attend(*[heads] * 3, local_window_size=(2, -1)), "local_window_size"),
        (lambda: attend(heads[:, :2], *[heads] * 2, local_window_size=2), "local_window_size"),
        (lambda: attend(*[heads] * 3, segment_ids=np.zeros((1, 2), int)), "segment_ids"),
        (lambda: attend(*[heads] * 3, implementation="flash"), "one of auto, plain, .*got 'fl"),
        (lambda: attend(*[heads] * 3, implementation="cudnn"), "not float32"),
    ],
    "losses": [
        (lambda: entropy(reduction="avg"), "reduction must .* got 'avg'"),
        (lambda: entropy(logits[0]), r"got logits \(3, 5\), labels \(2, 3\).*class indices"),
        (lambda: entropy(where=labels[0] > 0), r"where \(3,\)"),
        (lambda: ops.mse_loss(logits, logits[0]), "pred and target must"),
        (lambda: readout(b=table.T), r"kernel must be \(in, V\) .*Set transposed=True\?"),
        (lambda: readout(transposed=True), r"\(V, in\) .*Set transposed=False\?"),
        (lambda: readout(vocab=6), "vocab must be .* at most the kernel.*; got 6"),
        (lambda: readout(chunk_size=0), "chunk_size must .* got 0"),
        (lambda: readout(config=MatmulConfig(strategy=Delayed())), "scales in a state"),
    ],
    "experts": [
        (lambda: ops.route(three, four, 6), "top_k must be at most"),
        (lambda: ops.route(three, four[:2], 2), r"route: kernel must be \(in, out\)"),
        (lambda: ops.mixture(rows, three[:1], routing, ()), "x must .* 6 tokens of the routing"),
        (on_a_mesh, "the 2 devices of the axis 'expert' must divide the 3"),
        (lambda: in_shard_map(P("expert")), "must see the same tokens; got tokens that"),
        (lambda: in_shard_map(P(), check_vma=False), "need check_vma=True; got False"),
    ],
    "batch_size": [
        (lambda n=n: under(n), f"items.* got {n!r}") for n in (0, -1, 1.5, True, "many")
    ],
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_do_not_fit(name: str) -> None:
    for call, match in VALUES[name]:
        with cudnn_of((9, 0), 91200), pytest.raises(ValueError, match=match):
            call()


def test_other_arguments_of_the_wrong_type() -> None:
    for call, match in (
        (lambda: attend(*[heads] * 3, mask=jnp.ones((3, 3))), "mask must .* dtype float"),
        (lambda: attend(*[heads] * 3, segment_ids=np.zeros((1, 3))), "segment_ids"),
        (lambda: ops.embed(jnp.ones(2), table), "ids must be integers; got dtype float32"),
        (lambda: entropy(where=labels), "where must be boolean; got dtype int"),
        (lambda: ops.softmax_cross_entropy(logits, logits[..., 0]), "labels must be integers"),
        (lambda: ops.readout_cross_entropy(hidden, table, hidden[..., 0]), "labels must be int"),
        (lambda: ops.unit_scaled(jnp.cumsum, [x[0]])(jnp.arange(3)), r"\[0\] must be floating"),
    ):
        with pytest.raises(TypeError, match=match):
            call()


# Defaults by argument, as in jax.nn, jax.lax and Flax where they have the argument, and the ops
# and rules whose default is another.
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("bias", "gain", "config", "state", "where", "mask", "vocab", "base"), None),
    **dict.fromkeys(("key", "dropout_key", "scale_length", "scale_causal", "mean_square"), None),
    **dict.fromkeys(("statistics", "chunk_size", "logits_dtype", "out_features", "x"), None),
    **dict.fromkeys(("mult", "fwd", "bwd", "attn_ratio"), 1.0),
    **dict.fromkeys(("dilation", "input_dilation", "feature_group_count", "depth", "period"), 1),
    **dict.fromkeys(("left_repeats", "right_repeats"), 1),
    **dict.fromkeys(("is_causal", "transposed", "residual", "reset", "scaled"), False),
    **dict.fromkeys(("broadcast_dims", "cut"), ()),
    **dict.fromkeys(("count_include_pad", "renormalize"), True),
    **dict.fromkeys(("share", "tau"), 0.5),
    **{"constraint": "to_output_scale", "eps": 1e-6, "strides": 1, "padding": "SAME", "axis": -1},
    **{"dropout_rate": 0.0, "deterministic": True, "implementation": "auto", "seeds": 32},
    **{"reduction": "mean", "weights": (1.0, 1.0), "expert_axis": "expert", "name": "simulate"},
    **{"optimizer": "adam", "readout_constraint": None, "activation": jnp.tanh},
}
OTHERS = {
    "ops.readout": {"constraint": None},
    "rules.readout": {"constraint": None},
    "ops.avg_pool": {"strides": None, "padding": "VALID"},
    "ops.max_pool": {"strides": None, "padding": "VALID"},
    "rules.avg_pool": {"strides": None},
    "rules.max_pool": {"strides": None},
    "ops.readout_cross_entropy": {"constraint": None},
    "ops.attention_path": {"segment_ids": False, "mask": False},
    "ops.batch_norm": {"eps": 1e-5},
    "ops.dropout": {"deterministic": False},
    "ops.rotary": {"base": 10_000.0},
}


def test_default_arguments() -> None:
    functions = {
        f"{module.__name__.removeprefix('unitscale.')}.{name}": function
        for module in (ops, rules)
        for name, function in vars(module).items()
        if callable(function) and not inspect.isclass(function) and not name.startswith("_")
    }
    assert len(functions) > 60
    for name, function in functions.items():
        wanted = DEFAULTS | OTHERS.get(name, {})
        for argument, parameter in inspect.signature(function).parameters.items():
            found, expected = parameter.default, wanted.get(argument)
            if found is not parameter.empty:
                assert (found, type(found)) == (expected, type(expected)), f"{name}: {argument}"
    assert not rules.AttentionContext().gated

"""Each layer of a plain model made unit-scaled, or left alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from unitscale import nn, parallel

RNGS = nnx.Rngs(0)
NORMAL = nnx.initializers.normal(1.0)
# A plain layer, the shape of its input, and the class that it becomes.
LAYERS = {
    "linear": (nnx.Linear(8, 6, bias_init=NORMAL, rngs=RNGS), (3, 8), nn.Dense),
    "einsum": (
        nnx.Einsum("btd,dhk->bthk", (8, 2, 3), (2, 3), bias_init=NORMAL, rngs=RNGS),
        (2, 3, 8),
        nn.Einsum,
    ),
    "conv": (
        nnx.Conv(4, 6, (3,), 2, padding=1, feature_group_count=2, bias_init=NORMAL, rngs=RNGS),
        (2, 7, 4),
        nn.Conv,
    ),
    "zeros between": (
        nnx.Conv(4, 6, (3,), padding=((1, 2),), input_dilation=2, bias_init=NORMAL, rngs=RNGS),
        (2, 7, 4),
        nn.Conv,
    ),
    "conv transpose": (
        nnx.ConvTranspose(3, 6, (3, 1), (2, 4), bias_init=NORMAL, rngs=RNGS),
        (2, 5, 4, 3),
        nn.ConvTranspose,
    ),
    "layer norm": (
        nnx.LayerNorm(8, bias_init=NORMAL, scale_init=NORMAL, rngs=RNGS),
        (3, 8),
        nn.LayerNorm,
    ),
    "rms norm": (nnx.RMSNorm(8, epsilon=0.1, scale_init=NORMAL, rngs=RNGS), (3, 8), nn.RMSNorm),
    "group norm": (nnx.GroupNorm(8, 2, use_bias=False, rngs=RNGS), (2, 3, 8), nn.GroupNorm),
    "batch norm": (nnx.BatchNorm(8, use_scale=False, rngs=RNGS), (3, 8), nn.BatchNorm),
    "running": (nnx.BatchNorm(8, use_running_average=True, rngs=RNGS), (3, 8), nn.BatchNorm),
    "attention": (
        nnx.MultiHeadAttention(4, 8, num_kv_heads=2, bias_init=NORMAL, decode=False, rngs=RNGS),
        (2, 5, 8),
        nn.MultiHeadAttention,
    ),
}
LAYERS["running"][0].mean.set_value(jnp.arange(8.0))


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_keeps_its_function(name) -> None:
    layer, shape, kind = LAYERS[name]
    new, report = nn.unit_scale(layer, keep_function=True, max_length=5)
    assert isinstance(new, kind)
    assert (report.changed, report.layers[0].became) == (("",), kind.__name__)
    x = jax.random.normal(jax.random.key(0), shape)
    found = new(x)
    assert isinstance(found, jax.Array)
    np.testing.assert_allclose(found, nnx.clone(layer)(x), rtol=1e-5, atol=1e-5)


def test_dtypes_and_shardings_of_a_layer_are_kept() -> None:
    with jax.set_mesh(parallel.make_mesh({"data": 4, "model": 2})):
        layer = nnx.Linear(
            4,
            6,
            dtype=jnp.bfloat16,
            param_dtype=jnp.float16,
            kernel_metadata={"out_sharding": (None, "model")},
            rngs=nnx.Rngs(0),
        )
        new, _ = nn.unit_scale(layer, keep_function=True)
    assert new.policy == nn.Policy(param_dtype="float16", compute_dtype="bfloat16")
    assert new.kernel.get_value().sharding == layer.kernel.get_value().sharding
    assert new.kernel.out_sharding == layer.kernel.out_sharding


LEFT = {
    "mask": (nnx.Conv(2, 2, 3, mask=jnp.ones((3, 2, 2)), rngs=RNGS), "it has a mask"),
    "transposed": (
        nnx.ConvTranspose(2, 2, 3, transpose_kernel=True, rngs=RNGS),
        "a transposed kernel or circular padding",
    ),
    "circular": (
        nnx.ConvTranspose(2, 2, 3, padding="CIRCULAR", rngs=RNGS),
        "a transposed kernel or circular padding",
    ),
    "axes": (nnx.LayerNorm(2, reduction_axes=(-2, -1), rngs=RNGS), "axes are not the usual"),
    "batch axis": (nnx.BatchNorm(2, axis=1, rngs=RNGS), "axes are not the usual"),
    "axis name": (nnx.BatchNorm(2, axis_name="d", rngs=RNGS), "it has an axis_name"),
    "dot": (nnx.Linear(2, 2, dot_general=lambda *a, **k: a[0], rngs=RNGS), "its own dot_general"),
    "einsum": (nnx.Einsum("ab,bc->c", (2, 2), rngs=RNGS), "'a' in one term only"),
    "einsum op": (
        nnx.Einsum("ab,bc->ac", (2, 2), einsum_op=lambda *a, **k: a[1], rngs=RNGS),
        "its own einsum_op",
    ),
    "qk": (nnx.MultiHeadAttention(2, 4, normalize_qk=True, rngs=RNGS), "it normalizes queries"),
    "cell": (nnx.GRUCell(2, 2, rngs=RNGS), "GRUCell is not converted"),
    "lora": (nnx.LoRALinear(2, 2, lora_rank=1, rngs=RNGS), "LoRALinear is not converted"),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone_and_why(name) -> None:
    layer, reason = LEFT[name]
    new, report = nn.unit_scale(layer, rngs=nnx.Rngs(0))
    assert type(new) is type(layer)
    assert reason in report.skipped[""]

"""Converting plain models to unit-scaled ones: function, variance, and the report by layer."""

import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.gradients import jit
from tests.nn.table import of, parameters
from tests.refusals import refuses
from unitscale import nn, parallel


class Decoder(nnx.Module):
    """A user's model: modules in lists, a shared module, and code between modules."""

    def __init__(self, width: int = 32, **options) -> None:
        rngs = nnx.Rngs(1)
        self.embed = nnx.Embed(11, width, rngs=rngs)
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            4, width, decode=False, deterministic=True, rngs=rngs, **options
        )
        self.mlp = nnx.List(
            [nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)]
        )
        self.again = self.mlp[0]
        self.mix = nnx.LinearGeneral(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, deterministic=True, rngs=rngs)
        self.head = nnx.Linear(width, 11, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(ids))
        x = x + self.mlp[1](nnx.silu(self.mlp[0](x)) * self.again(x))
        return self.head(self.dropout(self.mix(x)))


IDS = np.arange(12).reshape(2, 6) % 11


def test_a_model_keeps_its_function_and_the_old_one_itself() -> None:
    model = Decoder(dropout_rate=0.2)
    before = nnx.graphdef(model)
    scaled, report = nn.unit_scale(model, keep_function=True, readout=["head"], max_length=6)
    assert nnx.graphdef(model) == before
    found, expected = nnx.jit(lambda *models: [each(IDS) for each in models])(scaled, model)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert scaled.again is scaled.mlp[0]
    assert isinstance(scaled.head, nn.Readout)
    assert report.changed == ("again", "attention", "embed", "head", "mlp.1", "norm")
    assert report.skipped == {
        "dropout": "in evaluation it would multiply by (1 - rate)^1/2",
        "mix": "LinearGeneral is not converted",
    }
    text = str(report)
    assert text.startswith("6 of 8 layers unit-scaled\nlayer ")
    assert "attend is divided by 32 features" in text
    assert text.endswith("losses between layers")
    for path, parameter in parameters(scaled).items():
        if "mlp" in path and path.endswith("kernel"):
            assert np.std(parameter[...]) == pytest.approx(1, abs=0.1)
    other, _ = nn.unit_scale(model, keep_function=True)
    assert isinstance(other.attention, nnx.MultiHeadAttention)


def test_new_parameters_are_unit_and_train() -> None:
    scaled, report = nn.unit_scale(Decoder(), policy="bfloat16", rngs=nnx.Rngs(3))
    assert set(report.skipped) == {"mix"}
    assert isinstance(scaled.dropout, nn.Dropout)
    for path, parameter in parameters(scaled).items():
        if path.endswith(("kernel", "embedding")) and "mix" not in path:
            assert parameter.role in ("weight", "embedding"), path
            rms = np.mean(np.square(parameter[...])) ** 0.5
            assert abs(rms - 1) < 5 / (2 * parameter.size) ** 0.5, path
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    gradient = nn.grad(lambda m: jnp.sum(jnp.sin(m(IDS).astype(jnp.float32))))
    hidden, grads = nnx.jit(lambda model: (model.mlp[0](x), gradient(model)))(scaled)
    assert hidden.dtype == jnp.bfloat16
    assert abs(np.mean(np.square(np.float32(hidden))) - 1) < 0.15
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


class Held(nnx.Module):
    """A model with layers in a tuple, and a parameter that two layers share."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.pair = nnx.data((nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)))
        self.embed, self.head = nnx.Embed(4, 4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)
        self.head.kernel = self.embed.embedding

    def __call__(self, ids):
        return self.head(self.pair[1](self.pair[0](self.embed(ids))))


def test_a_parameter_of_two_layers_stays_one() -> None:
    model = Held()
    for keep_function in (True, False):
        scaled, report = nn.unit_scale(model, keep_function=keep_function, rngs=nnx.Rngs(1))
        assert report.changed == ("pair.0", "pair.1")
        assert set(report.skipped.values()) == {"embed.embedding is shared with head.kernel"}
        assert scaled.head.kernel is scaled.embed.embedding
        if keep_function:
            found, expected = nnx.jit(lambda *models: [m(IDS % 4) for m in models])(scaled, model)
            np.testing.assert_allclose(found, expected, rtol=1e-5)


def stacked() -> nnx.List:
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs: nnx.Rngs) -> nnx.List:
        return nnx.List(
            [
                nnx.Linear(4, 4, rngs=rngs),
                nnx.Conv(4, 4, 3, rngs=rngs),
                nnx.Einsum("ab,bc->ac", (4, 4), rngs=rngs),
                nnx.Embed(4, 4, rngs=rngs),
                nnx.LayerNorm(4, rngs=rngs),
                nnx.BatchNorm(4, use_scale=False, use_bias=False, rngs=rngs),
                nnx.MultiHeadAttention(2, 4, rngs=rngs),
                nnx.Dropout(0.5, rngs=rngs),
            ]
        )

    return make(nnx.Rngs(0))


def frozen(layer: Any) -> Any:
    layer.kernel = nnx.Variable(layer.kernel[...])
    return layer


def own(*args: Any, **kwargs: Any) -> Any:
    return args[0]


def test_attention_that_is_told_not_to_decode() -> None:
    attention, _ = nn.unit_scale(
        nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(1)
    )
    assert attention.mult == 1
    x = np.ones((1, 3, 8), np.float32)
    told, plain = nnx.jit(lambda layer: (layer(x, decode=False), layer(x)))(attention)
    np.testing.assert_array_equal(told, plain)
    with pytest.raises(ValueError, match="takes no decode=True; call its method decode"):
        attention(x, decode=True)


# Name of a layer, its arguments and options, and the shape of its input.
FLAX: list[tuple[str, tuple[Any, ...], dict[str, Any], tuple[int, ...]]] = [
    ("Linear", (12, 7), {}, (3, 5, 12)),
    ("Einsum", ("...a,ab->...b", (5, 4), (4,)), {}, (2, 3, 5)),
    ("Einsum", ("nta, hab -> nthb", (2, 5, 4), (2, 4)), {}, (2, 3, 5)),
    ("Einsum", ("bthk,hkd->btd", (2, 4, 5), None), {}, (2, 3, 2, 4)),
    ("Einsum", ("bi,oi->bo", (6, 8), (1, 6)), {}, (3, 8)),
    ("Conv", (4, 6, 3), {}, (2, 9, 4)),
    ("Conv", (4, 6, (3,)), {"strides": 2, "padding": "VALID"}, (2, 3, 9, 4)),
    ("Conv", (4, 6, (3, 2), None), {"padding": 1, "kernel_dilation": None}, (2, 6, 5, 4)),
    ("Conv", (4, 6, (3,)), {"padding": "CAUSAL", "kernel_dilation": 2}, (2, 9, 4)),
    ("Conv", (4, 6, (3, 2)), {"padding": "CIRCULAR", "kernel_dilation": 2}, (2, 6, 5, 4)),
    ("Conv", (4, 6, (3, 2)), {"padding": ((1, 0), (0, 2)), "strides": 2}, (6, 5, 4)),
    ("Conv", (4, 6, (3, 3)), {"feature_group_count": 2, "use_bias": False}, (2, 6, 5, 4)),
    ("Conv", (4, 6, 4), {"input_dilation": 2, "padding": ((1, 2),)}, (2, 9, 4)),
    ("ConvTranspose", (4, 6, 1), {"strides": 2}, (2, 5, 4)),
    ("ConvTranspose", (4, 6, (3, 2)), {"padding": "VALID", "strides": (2, 3)}, (6, 5, 4)),
    ("ConvTranspose", (4, 6, (3, 2)), {"kernel_dilation": (2, 1), "strides": 2}, (2, 6, 5, 4)),
    ("ConvTranspose", (4, 6, 3, 2), {"padding": ((2, 1),), "use_bias": False}, (2, 3, 9, 4)),
    ("ConvTranspose", (4, 6, 3), {"padding": 1, "strides": None}, (2, 9, 4)),
    ("LayerNorm", (8,), {"epsilon": 0.1}, (3, 8)),
    ("RMSNorm", (8,), {"epsilon": 0.1}, (3, 8)),
    ("GroupNorm", (8, 2), {"use_bias": False}, (2, 3, 8)),
    ("GroupNorm", (8, None, 4), {"epsilon": 0.1}, (2, 3, 8)),
    ("BatchNorm", (8,), {"use_scale": False}, (3, 8)),
    ("BatchNorm", (8,), {"use_running_average": True}, (3, 8)),
    ("MultiHeadAttention", (4, 8), {"num_kv_heads": 2, "decode": False}, (2, 5, 8)),
]


def test_each_layer_keeps_its_function() -> None:
    """Each computes the same as Flax's layer, also after it was pickled."""
    olds, news, xs = [], [], []
    for name, args, options, shape in FLAX:
        old = getattr(nnx, name)(*args, **options, rngs=nnx.Rngs(0))
        for i, (path, value) in enumerate(nnx.to_flat_state(nnx.state(old))):
            if path[-1] in ("scale", "bias", "mean", "var"):
                value.set_value(jnp.linspace(0.5, 2.0 + i, value.size).reshape(value.shape))
                nnx.update(old, nnx.from_flat_state([(path, value)]))
        new, report = nn.unit_scale(old, keep_function=True, max_length=5)
        kind = "Dense" if name == "Linear" else name
        assert isinstance(new, getattr(nn, kind))
        assert (report.changed, report.layers[0].became) == (("",), kind)
        olds.append(old)
        news.append(pickle.loads(pickle.dumps(new)))
        xs.append(np.random.default_rng(0).normal(size=shape).astype(np.float32))
    run = jit(lambda models: [nnx.clone(m)(x) for m, x in zip(models, xs, strict=True)])
    for row, found, expected in zip(FLAX, run(news), run(olds), strict=True):
        assert isinstance(found, jax.Array)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=str(row))


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


LEFT: list[tuple[str, Callable[[], Any]]] = [
    ("its kernel is a Variable", lambda: frozen(of(nnx.Linear, 4, 4))),
    ("it has its own dot_general", lambda: of(nnx.Linear, 4, 4, dot_general=own)),
    (
        "it has its own preferred_element_type",
        lambda: of(nnx.Linear, 4, 4, preferred_element_type=jnp.float32),
    ),
    ("it has its own promote_dtype", lambda: of(nnx.LayerNorm, 4, promote_dtype=own)),
    ("it has its own conv_general", lambda: of(nnx.Conv, 4, 4, 3, conv_general_dilated=own)),
    ("it has its own einsum_op", lambda: of(nnx.Einsum, "ab,bc->ac", (4, 4), einsum_op=own)),
    ("nnx.vmap has stacked it", stacked),
    ("SpectralNorm is not converted", lambda: of(nnx.SpectralNorm, of(nnx.Linear, 4, 4))),
    ("LoRALinear is not converted", lambda: of(nnx.LoRALinear, 2, 2, lora_rank=1)),
    ("is not one of the kernel's", lambda: of(nnx.Einsum, "ab,bc->ac", (4, 4), (1,))),
    ("'a' in one term only", lambda: of(nnx.Einsum, "ab,bc->c", (2, 2))),
    ("it has a mask", lambda: of(nnx.Conv, 2, 2, 3, mask=jnp.ones((3, 2, 2)))),
    ("a transposed kernel", lambda: of(nnx.ConvTranspose, 2, 2, 3, transpose_kernel=True)),
    ("circular padding", lambda: of(nnx.ConvTranspose, 2, 2, 3, padding="CIRCULAR")),
    ("axes are not the default", lambda: of(nnx.LayerNorm, 2, reduction_axes=(-2, -1))),
    ("axes are not the default", lambda: of(nnx.BatchNorm, 2, axis=1)),
    ("it has an axis_name", lambda: of(nnx.BatchNorm, 2, axis_name="d")),
    ("it normalizes queries", lambda: of(nnx.MultiHeadAttention, 2, 4, normalize_qk=True)),
]


def test_what_is_left_alone_and_why() -> None:
    for reason, make in LEFT:
        layer = make()
        new, report = nn.unit_scale(layer, rngs=nnx.Rngs(0))
        assert type(new) is type(layer)
        assert report.skipped
        assert all(reason in found for found in report.skipped.values()), (reason, report)
        assert not report.changed


class Own(nnx.Module):
    def __init__(self) -> None:
        self.token = nnx.Param(jnp.zeros(4))
        self.gains = nnx.List([nnx.Param(jnp.ones(4))])
        self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(0))


def test_parameters_of_modules_are_reported() -> None:
    _, report = nn.unit_scale(Own(), rngs=nnx.Rngs(1))
    assert report.changed == ("dense",)
    assert {path: reason[:14] for path, reason in report.skipped.items()} == {
        "": "it holds token",
        "gains": "it holds 0: re",
    }


def kept(**options: Any) -> Any:
    return nn.unit_scale(Decoder(), keep_function=True, **options)


test_errors = refuses(
    [
        (ValueError, lambda: nn.unit_scale(Decoder()), "give rngs="),
        (ValueError, lambda: kept(readout=["head", "hea"]), r"'hea' .* of again, head, mlp\.1"),
        (ValueError, lambda: kept(policy="fp9"), "policy must be one of"),
    ]
)

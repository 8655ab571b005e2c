"""Policies of single layers: the products that they change, and those they leave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from unitscale import nn, to_array
from unitscale.quant import Static


def mlp(policy: str = "fp8") -> nn.MLP:
    return nn.MLP(16, 32, policy=policy, rngs=nnx.Rngs(0))


def normal(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)


def test_a_layer_computes_as_one_that_was_made_with_the_policy() -> None:
    mixed, fp8, wide = mlp(), mlp(), mlp("bfloat16")
    assert nn.set_policies(mixed, {"u*": "bfloat16"}) == {"up": "u*"}
    ups = [to_array(model.up(normal(4, 16))) for model in (mixed, fp8, wide)]
    downs = [to_array(model.down(normal(4, 32))) for model in (mixed, fp8, wide)]
    np.testing.assert_array_equal(ups[0], ups[2])
    np.testing.assert_array_equal(downs[0], downs[1])
    assert not np.array_equal(ups[0], ups[1])
    assert not np.array_equal(downs[0], downs[2])


def test_the_first_pattern_counts_and_the_state_stays() -> None:
    model = nn.TransformerLayer(16, 2, policy="fp8", rngs=nnx.Rngs(0))
    before = nnx.state(model)
    found = nn.set_policies(model, {"*.query": "bfloat16", "attention.*": "mxfp8"})
    assert found == {
        "attention.query": "*.query",
        **{f"attention.{name}": "attention.*" for name in ("key", "value", "out")},
    }
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
    assert (model.attention.key.policy, model.mlp.up.policy) == (
        nn.as_policy("mxfp8"),
        nn.as_policy("fp8"),
    )


def test_a_shared_layer_is_one_layer() -> None:
    layer = nn.Dense(16, 16, policy="fp8", rngs=nnx.Rngs(0))
    model = nnx.Sequential(layer, layer)
    assert nn.set_policies(model, {"layers.*": "bfloat16"}) == {"layers.0": "layers.*"}
    with pytest.raises(ValueError, match=r"no layer matches 'layers\.1'"):
        nn.set_policies(model, {"layers.0": "bfloat16", "layers.1": "fp8"})


def test_scales_that_are_no_longer_read_go() -> None:
    model = mlp("fp8_delayed")
    nn.set_policies(model, {"down": "fp8"})
    assert model.down.amax is None
    assert model.up.amax is not None


def test_embeddings_have_the_role_of_a_readout() -> None:
    model = nn.Embed(16, 8, policy="fp8", rngs=nnx.Rngs(0))
    # Its exempt product keeps no scales, so that the policy is one that can be set.
    assert nn.set_policies(model, {"*": "fp8_delayed"}) == {"": "*"}


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"gate": "bfloat16"}, "set_policies: no layer matches 'gate'; nearest are"),
        ({"up": "bfloat16", "u*": "fp8"}, r"every layer that 'u\*' matches is taken"),
        ({"up": "fp8_delayed"}, "'up' must keep no scales; got as_policy.'fp8_delayed'.*of up"),
        (
            {"up": nn.Policy(param_dtype="bfloat16")},
            "must store parameters in float32, as up does; got bfloat16",
        ),
        ({"up": "fp9"}, "policy must be one of .* got 'fp9'"),
    ],
)
def test_what_cannot_be_set_changes_nothing(rules: dict, words: str) -> None:
    model = mlp()
    before = nnx.graphdef(model)
    with pytest.raises(ValueError, match=words):
        nn.set_policies(model, {"down": "bfloat16"} | rules)
    assert nnx.graphdef(model) == before


def test_static_scales_that_are_given_are_no_state() -> None:
    from_given = nn.as_policy("fp8").matmul
    assert from_given is not None
    static = nn.Policy(
        compute_dtype="bfloat16",
        matmul=type(from_given)(strategy=Static(scales=(1.0, 1.0, 1.0))),
    )
    model = mlp()
    nn.set_policies(model, {"*": static})
    expected = mlp()(normal(4, 16))  # scales of 1 are those of Unit
    np.testing.assert_array_equal(to_array(model(normal(4, 16))), to_array(expected))


def test_a_recurrent_kernel_has_a_policy_of_its_own() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 5, 4))

    def outputs(policy: str, rules: dict[str, str]) -> np.ndarray:
        model = nn.RNN(nn.GRUCell(4, 8, policy=policy, rngs=nnx.Rngs(0)))
        nn.set_policies(model, rules)
        return np.asarray(to_array(model(x), jnp.float32))

    fp8, wide = outputs("fp8", {}), outputs("bfloat16", {})
    recurrent = outputs("bfloat16", {"cell.dense_h.*": "fp8"})
    assert not np.array_equal(recurrent, wide)
    assert not np.array_equal(recurrent, fp8)
    np.testing.assert_array_equal(outputs("fp8", {"cell.*": "bfloat16"}), wide)
    assert np.isfinite(outputs("fp8_delayed", {"cell.dense_h.*": "bfloat16"})).all()


def test_a_model_of_the_other_kind_is_told_apart() -> None:
    ours, plain = nn.MLP(4, 8, rngs=nnx.Rngs(0)), nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"no layers of plain Flax .*or use nn.set_policies"):
        nn.convert(ours, "fp8_dynamic")
    with pytest.raises(ValueError, match=r"no layers of unitscale.nn. Use nn.convert"):
        nn.set_policies(plain, {"*": "fp8"})
    with pytest.raises(ValueError, match=r"cannot be stored in FP8"):
        nn.to_static(ours)

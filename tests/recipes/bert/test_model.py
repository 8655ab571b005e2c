"""BERT: gradients of every objective, segments, padding, and predictions at given positions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import unitscale
from recipes.bert.config import BertModelConfig, Pairs
from recipes.bert.model import Bert, Encoder, head_constant, mean_loss, rows_of
from tests.gradients import check, jit
from tests.modules import FLOAT64, build, model_loss
from unitscale import ScaledArray, batch_over, ops
from unitscale.parallel import make_mesh

VOCAB, TIME = 11, 9


def shape(**options: Any) -> BertModelConfig:
    small = {"vocab": VOCAB, "width": 8, "layers": 1, "heads": 2, "mlp_ratio": 2.0, "context": 10}
    return BertModelConfig.model_validate(small | {"dropout": 0.0} | options)


def batch() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (3, TIME)).astype(np.int32)
    segments = np.tile(np.arange(TIME, dtype=np.int32) > 4, (3, 1)).astype(np.int32)
    positions = np.array([[1, 4], [2, 7], [0, 3]], np.int32)
    targets = rng.integers(0, VOCAB, (3, 2)).astype(np.int32)
    counts = np.array([[True, True], [True, False], [True, True]])
    return ids, segments, positions, targets, counts, np.array([0, 1, 1], np.int32)


# Each objective, readout, placement and dropout stands in a row.
GRADIENTS = [
    pytest.param("sentence_order", {"dropout": 0.2}),
    pytest.param("none", {}, marks=pytest.mark.slow),
    pytest.param(
        "next_sentence", {"norm_placement": "pre", "tied_readout": False}, marks=pytest.mark.slow
    ),
    pytest.param("none", {"norm_placement": "pre", "positions": "rope"}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("pairs", "options"), GRADIENTS)
def test_gradients_are_positive_constants_times_the_true_ones(pairs: Pairs, options: dict) -> None:
    config, inputs = shape(**options), batch() if pairs != "none" else batch()[:5]
    # The bias of keys moves all logits of a query alike, unless it is turned with the position.
    turned = config.positions == "rope"
    zero = () if turned else ("attention.key.bias",)
    with jax.enable_x64(True):
        model = build(lambda: Bert(config, pairs, policy=FLOAT64, rngs=nnx.Rngs(0)))

        def loss(model: Bert) -> jax.Array:
            return model.loss(*map(jnp.asarray, inputs), deterministic=config.dropout == 0)

        constants = check(*model_loss(model, loss), directions=1, zero=zero)
    per_layer = 6 + 5 + turned + 4  # kernels, biases that matter, norms
    tables = 2 + (not turned)
    heads = 4 + (not config.tied_readout) + (3 if pairs != "none" else 0)
    assert len(constants) == tables + 2 + config.layers * per_layer + heads


@pytest.mark.slow
def test_gradients_on_several_devices_are_those_on_one() -> None:
    model = Bert(shape(), "sentence_order", policy="float32", rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    rows = [np.concatenate([part] * 4)[:8] for part in batch()]
    rows[4] = np.ones_like(rows[4])  # a mean over devices is the mean where each counts as many

    def gradients(devices: int) -> list[jax.Array]:
        mesh = make_mesh({"data": devices}, devices=jax.devices()[:devices])

        def local(params: Any, *batch: jax.Array) -> Any:
            with batch_over("data"):
                grads = unitscale.grad(lambda p: nnx.merge(graphdef, p).loss(*batch))(params)
            return jax.lax.pmean(grads, "data")

        whole, parts = PartitionSpec(), [PartitionSpec("data")] * len(rows)
        run = jax.shard_map(
            local, mesh=mesh, in_specs=(whole, *parts), out_specs=whole, check_vma=False
        )
        return jax.tree.leaves(jax.jit(run)(params, *rows))

    alone = gradients(1)
    # float32 sums over 8 x 9 tokens in another order
    error = rows[0].size * np.finfo(np.float32).eps * max(float(jnp.abs(g).max()) for g in alone)
    for one, many in zip(alone, gradients(4), strict=True):
        np.testing.assert_allclose(many, one, rtol=0, atol=error)


def test_logits_and_rows_are_those_of_the_positions() -> None:
    model = build(lambda: Bert(shape(), policy="float32", rngs=nnx.Rngs(0)))
    x = np.random.default_rng(1).normal(size=(3, TIME, 8)).astype(np.float32)
    positions, everywhere = jnp.asarray(batch()[2]), jnp.tile(jnp.arange(TIME), (3, 1))

    @jit
    def found(scale):
        rows = rows_of(ScaledArray(jnp.asarray(x), scale), positions).value
        logits = [model.predict(x, places).value for places in (positions, everywhere)]
        return rows, logits

    rows, (logits, everything) = found(jnp.float32(4))
    np.testing.assert_array_equal(rows, 4 * np.take_along_axis(x, positions[..., None], 1))
    there = np.take_along_axis(np.asarray(everything), positions[..., None], 1)
    np.testing.assert_allclose(logits, there, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("placement", "positions"),
    [("post", "learned"), pytest.param("pre", "rope", marks=pytest.mark.slow)],
)
def test_order_and_segments_are_seen_and_padding_is_not(placement: str, positions: str) -> None:
    config = shape(norm_placement=placement, positions=positions)
    encoder = build(lambda: Encoder(config, policy="float32", rngs=nnx.Rngs(0)))
    ids, segments, *_ = map(jnp.asarray, batch())
    mask = jnp.arange(TIME)[None] < jnp.array([[9], [6], [3]])

    @jit
    def outputs(ids, segments):
        return jnp.where(mask[..., None], encoder(ids, segments, mask=mask).value, 0)

    changed = jnp.where(mask, ids, (ids + 1) % VOCAB)
    own = outputs(ids, segments)
    np.testing.assert_array_equal(own, outputs(changed, segments))
    assert (own != outputs(ids, 1 - segments)).any()
    order = jnp.array([0, 2, 1, 3, 4, 5, 6, 7, 8])  # within one segment
    assert ids[0, 1] != ids[0, 2]
    assert np.abs(outputs(ids[:, order], segments)[0, order] - own[0]).max() > 1e-3


@pytest.mark.parametrize("counted", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_the_loss_is_a_mean_and_its_gradient_that_of_the_head(counted: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 8, 16)).astype(np.float32)
    kernel = rng.normal(size=(16, 5)).astype(np.float32)
    positions, labels = np.array([[0, 3, 4], [1, 2, 7]]), rng.integers(0, 5, (2, 3))
    where = np.arange(6).reshape(2, 3) < counted

    def ours(x):
        return mean_loss(ops.readout(rows_of(x, positions), kernel), labels, where)

    def plain(x):
        rows = jnp.take_along_axis(x, positions[..., None], 1)
        losses = -jax.nn.log_softmax(rows @ kernel / 16)
        picked = jnp.take_along_axis(losses, labels[..., None], -1)[..., 0]
        return jnp.sum(picked, where=where) / counted

    (value, found), (mean, true) = (jit(jax.value_and_grad(f))(x) for f in (ours, plain))
    np.testing.assert_allclose(value, mean, rtol=1e-5)
    np.testing.assert_allclose(found, head_constant(5, 6, 16, 16) * true, rtol=1e-5, atol=1e-5)
    assert mean_loss(jnp.asarray(kernel), labels[0, :1].repeat(16), np.zeros(16, bool)) == 0

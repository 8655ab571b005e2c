"""Recipe bert: pairs of segments with hidden tokens, gradients of every objective, and training."""

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from pydantic import ValidationError

import unitscale
from recipes.bert.config import BertConfig, BertModelConfig, Pairs
from recipes.bert.model import Bert, Encoder, head_constant, mean_loss, rows_of
from recipes.bert.task import (
    MaskedCorpus,
    Vocabulary,
    abstract_batch,
    build as build_bert,
    closing,
    load_data,
)
from recipes.cli import main
from recipes.pooling import mean_of_tokens
from recipes.train import train
from tests.gradients import check, jit
from tests.modules import FLOAT64, build, model_loss
from unitscale import ScaledArray, batch_over, ops
from unitscale.parallel import make_mesh

from ..runs import resumes_bit_for_bit
from ..support import bert_config, refuses_configs, write_bert

SPECIAL = 5
VOCABULARY = Vocabulary(2, 3, 4, np.arange(1000) < SPECIAL, np.ones(1000, bool))


def hide(ids: np.ndarray, words: np.ndarray, predictions: int, seed: int = 0):
    return VOCABULARY.hide(ids, words, predictions, np.random.default_rng(seed))


def test_targets_are_the_hidden_tokens() -> None:
    ids = np.where(np.arange(100) % 10, np.arange(5, 105), 2)
    seen, positions, targets, counts = hide(ids, np.arange(100), 15)
    assert counts.all()
    assert (np.diff(positions) > 0).all()
    assert (positions % 10 != 0).all()  # special tokens
    np.testing.assert_array_equal(targets, ids[positions])
    rest = np.setdiff1d(np.arange(100), positions)
    np.testing.assert_array_equal(seen[rest], ids[rest])
    assert {part.dtype for part in (seen, positions, targets)} == {np.dtype(np.int32)}


def test_hidden_tokens_have_the_shares_of_bert() -> None:
    count, ordinary = 20_000, 1000 - SPECIAL
    seen, *_ = hide(np.full(count, SPECIAL), np.arange(count), count)
    shares = [np.mean(seen == VOCABULARY.mask), np.mean(seen == SPECIAL)]
    strangers = seen[(seen != VOCABULARY.mask) & (seen != SPECIAL)]
    for share, want in zip(shares, [0.8, 0.1 + 0.1 / ordinary], strict=True):
        assert abs(share - want) < 5 * np.sqrt(want * (1 - want) / count)
    assert strangers.min() >= SPECIAL
    assert np.unique(strangers).size > ordinary / 2


def test_too_few_words_fill_up_with_predictions_that_do_not_count() -> None:
    _, positions, targets, counts = hide(np.array([2, 8, 9, 3]), np.array([0, 1, 1, 2]), 4)
    np.testing.assert_array_equal(counts, [True, True, False, False])
    np.testing.assert_array_equal(positions, [1, 2, 0, 0])
    np.testing.assert_array_equal(targets, [8, 9, 0, 0])
    seen, *_, counts = hide(np.array([2, 3]), np.array([0, 1]), 2)
    assert not counts.any()
    np.testing.assert_array_equal(seen, [2, 3])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


def load(path: Path, *overrides: str) -> MaskedCorpus:
    return load_data(bert_config(path, *overrides))


def whole(batch) -> np.ndarray:
    """Return the ids of a batch with the hidden tokens restored."""
    ids, _, positions, targets, counts = batch[:5]
    ids = ids.copy()
    for row in range(len(ids)):
        ids[row, positions[row][counts[row]]] = targets[row][counts[row]]
    return ids


def texts(data: MaskedCorpus, batch) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the two segments of each sequence."""
    found = []
    for ids, segments in zip(whole(batch), batch[1], strict=True):
        assert ids[0] == data.vocabulary.first
        assert ids[-1] == data.vocabulary.end
        cut = int(segments.sum())
        assert ids[-cut - 1] == data.vocabulary.end
        np.testing.assert_array_equal(segments, np.arange(ids.size) >= ids.size - cut)
        found.append((ids[1 : -cut - 1], ids[-cut:-1]))
    return found


def test_segments_begin_with_words(path: Path) -> None:
    data = load(path)
    batch = next(data.training(0))
    assert [part.shape for part in batch] == [(4, 16), (4, 16), (4, 2), (4, 2), (4, 2)]
    for segment in itertools.chain(*texts(data, batch)):
        assert data.vocabulary.begins[segment[0]]


def test_words_of_a_text_are_hidden_whole(path: Path) -> None:
    data = load(path, "data.masking={share: 0.4, whole_words: true}")
    for _, batch in zip(range(10), data.training(0), strict=False):
        for ids, positions, counts in zip(whole(batch), batch[2], batch[4], strict=True):
            hidden = np.isin(np.arange(ids.size), positions[counts])
            inside = ~data.vocabulary.begins[ids]
            np.testing.assert_array_equal(hidden[1:][inside[1:]], hidden[:-1][inside[1:]])


@pytest.mark.parametrize("pairs", ["next_sentence", "sentence_order"])
def test_the_answer_says_what_was_done_to_the_pair(path: Path, pairs: str) -> None:
    data, ordered = load(path, f"data.pairs={pairs}"), pairs == "sentence_order"
    text = data.texts[0].train.astype(np.int32)
    places = np.lib.stride_tricks.sliding_window_view(text, 13)
    agree: dict[int, list[bool]] = {0: [], 1: []}
    for _, batch in zip(range(25), data.training(0), strict=False):
        for (left, right), answer in zip(texts(data, batch), batch[5], strict=True):
            turned = [right, left] if ordered and answer else [left, right]
            agree[int(answer)].append((places == np.concatenate(turned)).all(-1).any())
    assert 30 < len(agree[1]) < 70  # of 100 fair draws: four standard deviations
    assert all(agree[0])
    assert all(agree[1]) if ordered else np.mean(agree[1]) < 0.5


@pytest.mark.slow
def test_masks_are_drawn_anew_each_epoch_and_fixed_in_validation(path: Path) -> None:
    data = load(path, "data.max_bytes=1500", "data.batch_size=1")
    epoch = len(data.examples(training=True)[0].source)
    batches = data.training(0)
    drawn: dict[bytes, list[bytes]] = {}
    for _ in range(2 * epoch):
        batch = next(batches)
        drawn.setdefault(whole(batch).tobytes(), []).append(batch[2].tobytes())
    assert any(len(set(positions)) > 1 for positions in drawn.values())
    for one, other in zip(data.validation(), data.validation(), strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_position_is_resumed_and_a_batch_shared(path: Path) -> None:
    data = load(path, "data.pairs=next_sentence")
    batches = data.training(3)
    halves = [next(data.training(3, process=i, processes=2)) for i in range(2)]
    for part, *shares in zip(next(batches), *halves, strict=True):
        np.testing.assert_array_equal(part, np.stack(shares, 1).reshape(part.shape))
    state = batches.get_state()
    again = data.training(3)
    again.set_state(state)
    for _ in range(3):
        for a, b in zip(next(batches), next(again), strict=True):
            np.testing.assert_array_equal(a, b)


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


@pytest.mark.slow
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


WORDS = [
    "data.pairs=sentence_order",
    # A smaller program than adam's, and what 60 steps learn first: how often each token is hidden.
    "optimizer={name: sgd, b1: 0.0, learning_rate: 0.1, multipliers: {bias: 1.0, norm: 1.0}}",
    "train={steps: 60, eval_every: 100, checkpoint_every: 100, log_every: 1}",
]


@pytest.mark.slow
def test_it_learns_and_stopped_and_resumed_does_so_bit_for_bit(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, stopped = (bert_config(path, *WORDS, f"name={name}") for name in ("whole", "stopped"))
    expected = resumes_bit_for_bit(whole, stopped)
    assert expected.validation_loss is not None
    assert expected.validation_loss < 0.8 * np.log(whole.model.vocab) + np.log(2)
    capsys.readouterr()
    assert main(["evaluate", str(path), *WORDS, "name=whole"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("step 60  validation loss ")
    assert said.endswith(" nats per hidden token plus nats per pair\n")
    loss = train(plain(tmp_path, "train.steps=8")).validation_loss
    assert loss is not None
    assert loss < np.log(120)


def test_abstract_batches_are_like_those_of_the_data(path: Path) -> None:
    for pairs in ("none", "next_sentence"):
        config = bert_config(path, f"data.pairs={pairs}")
        expected = [(part.shape, part.dtype) for part in next(load_data(config).training(0))]
        assert [(part.shape, part.dtype) for part in abstract_batch(config)] == expected


class Sure:
    """A model that predicts token 7 everywhere."""

    def encoder(self, ids: Any, segments: Any) -> Any:
        return ids

    def predict(self, x: Any, positions: Any) -> Any:
        return np.broadcast_to(np.arange(20) == 7, (*positions.shape, 20)).astype(np.float32)


def test_closing_shows_guesses_beside_the_truth(path: Path, tmp_path: Path) -> None:
    config = bert_config(path, "train.sample_tokens=1")
    data = load_data(config)
    (line,) = closing(config, data, Sure(), tmp_path)
    assert line.startswith(f"guesses (truth): {data.tokenizer.decode([7])} (")
    assert line.count("(") == config.data.predictions + 1
    assert not list(closing(bert_config(path), data, Sure(), tmp_path))


PLAIN = (
    "model.library=plain",
    "model.norm_placement=pre",
    "optimizer.umup=false",
    "optimizer.learning_rate=1e-2",
    "model.dropout=0.0",
)


def plain(folder: Path, *words: str) -> BertConfig:
    return bert_config(write_bert(folder), *PLAIN, *words)


def test_parameters_are_those_of_the_unitscale_model(tmp_path: Path) -> None:
    for word in ("model.positions=rope", "model.tied_readout=false"):
        sizes = []
        for words in ((), ("model.library=unitscale", "optimizer.umup=true")):
            config = plain(tmp_path, word, *words)
            model = nnx.eval_shape(lambda config=config: build_bert(config))
            sizes.append(sorted(p.shape for p in jax.tree.leaves(nnx.state(model, nnx.Param))))
        assert sizes[0] == sizes[1]


def test_the_loss_is_the_mean_over_hidden_tokens_that_count(tmp_path: Path) -> None:
    config = plain(tmp_path)
    batch = next(load_data(config).validation(4))
    ids, segments, positions, targets, _ = map(jnp.asarray, batch)
    counts = jnp.asarray(np.arange(positions.size).reshape(positions.shape) % 3 > 0)

    @jax.jit
    def outputs() -> Any:
        model: Any = build_bert(config)
        logits = model.predict(model.encoder(ids, segments), positions)
        return logits, model.loss(ids, segments, positions, targets, counts)

    logits, loss = outputs()
    logits = np.asarray(logits, np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    taken = np.take_along_axis(shares, np.asarray(targets)[..., None], -1)[..., 0]
    expected = -np.log(taken)[np.asarray(counts)].mean()
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(expected, np.log(120), rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_a_token_sees_both_sides_and_where_they_are(tmp_path: Path, positions: str) -> None:
    config = plain(tmp_path, f"model.positions={positions}")
    segments = jnp.zeros((1, 16), jnp.int32)
    outputs = jax.jit(lambda ids: build_bert(config).encoder(ids, segments))
    ids = jnp.arange(10, 26)[None]
    before = outputs(ids)
    for place in (0, 15):
        after = outputs(ids.at[0, place].set(5))
        assert np.abs(np.asarray(after - before)).max(-1).min() > 1e-6
    moved = outputs(ids[:, ::-1])
    assert np.abs(np.asarray(moved[:, ::-1] - before)).max() > 1e-4


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_bert(tmp_path)


def test_the_config_of_an_earlier_version_is_read(config_file: Path) -> None:
    config = bert_config(config_file, "model.residual={mult: 2.0}")
    assert config.model.residual.scheme == "fixed"
    old = config.model_dump(mode="json")
    old["data"]["masking"] |= {"masked": 0.8, "random": 0.1}
    old["model"]["residual"]["tau"] = None
    assert BertConfig.model_validate(BertConfig.upgraded(old)) == config
    old["data"]["masking"]["masked"] = 0.9
    with pytest.raises(ValidationError, match=r"masking\.masked"):
        BertConfig.model_validate(BertConfig.upgraded(old))


test_what_cannot_be_is_refused = refuses_configs(
    [
        ("data.tokenizer={kind: byte, vocab: null, lowercase: false}", "wordpiece or file"),
        ("data.sequence_length=4", "sequence_length must be at least 5"),
        ("precision=scalify_float16", "precision"),
        ("data.pairs=next_sentences", r"data\.pairs .*next_sentence"),
        # Keys that only unitscale has.
        ([*PLAIN, "precision.policy=fp8"], r"precision\.policy|policy in FP8"),
        ([*PLAIN, "data.pairs=next_sentence"], r"data\.pairs"),
        ([*PLAIN, "model.norm_placement=post"], "norm_placement"),
    ]
)


X = np.random.default_rng(0).normal(size=(4, 9, 5)).astype(np.float32)
GIVEN = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
MASK = np.arange(9) < np.array([[9], [6], [1], [0]])


@pytest.mark.parametrize("masked", [False, True])
def test_the_mean_is_unit_scaled_and_its_gradient_true_times_one_constant(masked: bool) -> None:
    kept = MASK if masked else np.ones_like(MASK)
    x = np.where(kept[..., None], X, np.inf)
    weights = (kept / np.sqrt(np.maximum(kept.sum(1, keepdims=True), 1)))[..., None]
    found, pullback = jax.vjp(lambda x: mean_of_tokens(x, jnp.asarray(MASK) if masked else None), x)
    np.testing.assert_allclose(found, (X * weights).sum(1), rtol=1e-5, atol=1e-6)
    # The root of time, however many tokens count.
    true = GIVEN[:, None] * weights
    np.testing.assert_allclose(pullback(GIVEN)[0], 9**0.5 * true, rtol=1e-5, atol=1e-6)

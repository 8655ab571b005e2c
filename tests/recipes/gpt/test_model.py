"""The GPT: gradients, masks between documents, generation with a cache, and fine-tuning in FP8."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.config import GPTModelConfig, RunConfig
from recipes.errors import RecipeError
from recipes.gpt.config import GPTConfig
from recipes.gpt.generate import Writer, draw
from recipes.gpt.task import GPT, build as build_gpt, load_data
from recipes.hf import load, plain
from recipes.registry import load_config
from recipes.run.folder import read_metrics
from recipes.run.probe import probe
from recipes.run.state import init_state, load_trained
from recipes.run.step import make_train_step
from recipes.text import ByteTokenizer
from tests.gradients import check, jit
from tests.modules import FLOAT64, build, model_loss
from tests.products import conversions
from unitscale.core import is_scaled

from ..conftest import TEXT, MakeConfig
from ..pretrained import change_config, change_tensors, copied, one_layer
from ..runs import resumes_bit_for_bit
from ..support import CONFIGS

# Each option of the model, of several values each, stands in one of them.
TIED = {"tied_readout": True, "positions": "learned", "norm": "layer", "vocab_multiple": 16}
GATED = {
    "mlp": "gated",
    "kv_heads": 2,
    "dropout": 0.2,
    "bias": True,
    "vocab_multiple": 4,
    "residual": {"scheme": "fixed", "tau": 0.4},
}


def make(options: dict[str, Any], policy: Any = "float32") -> GPT:
    shape = {"vocab": 11, "width": 8, "layers": 2, "heads": 4, "mlp_ratio": 2.0, "context": 12}
    config = GPTModelConfig.model_validate(shape | options)
    return build(lambda: GPT(config, policy=policy, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("options", [GATED, pytest.param(TIED, marks=pytest.mark.slow)])
def test_gradients_are_constants_times_the_truth(options: dict[str, Any]) -> None:
    with jax.enable_x64(True):
        model = make(options | {"layers": 1}, FLOAT64)
        ids = np.random.default_rng(5).integers(0, 11, (2, 7))
        dropped = {"deterministic": model.config.dropout == 0}
        loss = model_loss(model, lambda m: m.loss(ids[:, :-1], ids[:, 1:], **dropped))
        check(*loss, directions=2)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"scan": True, "kv_heads": 2}, marks=pytest.mark.slow)]
)
def test_documents_and_windows_limit_attention(options: dict[str, Any]) -> None:
    window = np.array([3, 1, 4, 0, 5, 9, 2, 6, 5, 0, 8, 7])  # 0 ends a document
    other = window.copy()
    other[[1, 5]] = 7  # of the first two documents

    def changed(**end: int) -> np.ndarray:
        """Return which logits change."""
        model = make(options | end)
        values = jit(lambda ids: model(ids).value)(np.stack([window, other]))
        return np.abs(values[0] - values[1]).max(-1) > 1e-4

    # From the changed id on, to the end of its document.
    np.testing.assert_array_equal(np.flatnonzero(changed(document_end=0)), [1, 2, 3, 5, 6, 7, 8, 9])
    np.testing.assert_array_equal(np.flatnonzero(changed()), np.arange(1, 12))
    # One token further in each layer.
    np.testing.assert_array_equal(np.flatnonzero(changed(window=2)), [1, 2, 3, 5, 6, 7])


ZEROS = jnp.zeros((1, 16), jnp.int32)


def test_matmuls_of_layers_are_converted_and_weights_are_not(make_config: MakeConfig) -> None:
    found = []
    for words in ((), ("precision.matmuls=fp8_dynamic",)):
        config = make_config("precision.policy=float16", *words)
        graphdef, params, rest = nnx.eval_shape(
            lambda c=config: nnx.split(build_gpt(c), nnx.Param, ...)
        )
        call = lambda *state, g=graphdef: nnx.merge(g, *state)(ZEROS)  # noqa: E731
        jaxpr = jax.make_jaxpr(call)(params, rest)
        assert [x.dtype for x in jaxpr.out_avals] == [jnp.float16]
        found.append((len(conversions(jaxpr, "float8_e4m3fn")), jax.tree.leaves(params)))
    # Both operands of query, key, value, out, up and down; not of the readout.
    assert [count for count, _ in found] == [0, 12]
    assert found[0][1] == found[1][1]


def test_the_end_of_documents_is_that_of_the_tokenizer(make_config: MakeConfig) -> None:
    config = make_config("model.library=unitscale", "model.document_end=3")
    with pytest.raises(RecipeError, match=r"model\.document_end: expected .* None; got 3"):
        load_data(config)


@pytest.mark.slow
def test_remat_changes_nothing(make_config: MakeConfig) -> None:
    """Two steps have the same losses, updates and dropout masks, and the probe the same values."""
    taken = []
    for remat in ("none", "layer"):
        graphdef, optimizer, state = init_state(make_config(f"model.remat={remat}"))
        reading = probe(nnx.merge(graphdef, state.params, state.rest), ZEROS, ZEROS)
        ids = np.arange(68, dtype=np.int32).reshape(4, 17)
        step = make_train_step(graphdef, optimizer)
        state, _ = step(state, ids, np.int32(0))
        state, values = step(state, ids, np.int32(1))
        taken.append((dict(reading.activations), values, state.params))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, 1e-5, 1e-6), *taken)


def test_biases_of_linear_layers() -> None:
    """All six linear layers of a Transformer layer have a bias; the readout has none."""
    for library in ("unitscale", "plain"):
        count = {}
        for bias in (False, True):
            model = {"library": library, "layers": 1, "norm": "layer", "bias": bias}
            optimizer = {"umup": library == "unitscale"}
            config = GPTConfig.model_validate({"name": "x", "model": model, "optimizer": optimizer})
            state = nnx.eval_shape(lambda config=config: nnx.state(build_gpt(config), nnx.Param))
            names = [str(path[-1]) for path, _ in nnx.to_flat_state(state)]
            count[bias] = names.count("bias")
        assert count[True] - count[False] == 6


BYTES, CONTEXT = ByteTokenizer(), 12


@functools.cache
def cached(library: str, **shape: Any) -> Any:
    small = {"vocab": 256, "width": 16, "layers": 1, "heads": 4, "context": CONTEXT}
    config = GPTModelConfig.model_validate(small | shape)
    if library == "unitscale":
        return GPT(config, policy="float32", rngs=nnx.Rngs(0))
    # GPT-2's small weights make every token alike.
    graphdef, params, rest = nnx.split(plain.GPT(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    return nnx.merge(graphdef, jax.tree.map(lambda p: p * 5, params), rest)


def jitted(model: Any) -> Callable[..., Any]:
    return functools.partial(nnx.jit(lambda model, ids: jnp.asarray(model(ids))), model)


def greedy(model: Any, prompt: str, tokens: int) -> str:
    """Continue greedily with the model without a cache, restarting when the context is full."""
    ids, most, call = list(prompt.encode()), CONTEXT - 1, jitted(model)
    while tokens:
        visible = ids[-most:]
        while tokens and len(visible) < CONTEXT:
            padded = np.zeros((1, CONTEXT), np.int32)  # of one shape: later ids are not seen
            padded[0, : len(visible)] = visible
            new = int(call(padded)[0, len(visible) - 1].argmax())
            ids, visible, tokens = [*ids, new], [*visible, new], tokens - 1
        most = CONTEXT // 2
    return BYTES.decode(np.array(ids))


PROMPT = "a prompt longer than it"


@pytest.mark.parametrize("library", [pytest.param("plain", marks=pytest.mark.slow), "unitscale"])
def test_text_is_that_of_the_uncached_model_also_past_the_context(library: str) -> None:
    model = cached(library, positions="learned")
    writer = Writer(model, BYTES, CONTEXT)
    text = writer(PROMPT, tokens=16, seed=0, temperature=0.0)
    assert text == greedy(model, PROMPT, 16)


def test_draws_follow_the_softmax() -> None:
    """Samples follow the softmax; `top_k` takes the first of equal logits."""
    logits, keys = np.array([0.5, 2.0, 1.0, 2.0, 1.0]), jax.random.split(jax.random.key(1), 4000)
    for temperature, top_k in ((1.0, None), (2.0, 3), (0.5, 99), (0.0, None)):
        options = {"temperature": temperature, "top_k": top_k}
        pick = functools.partial(draw, jnp.asarray(logits)[None], **options)
        out = jax.jit(jax.vmap(pick))(keys)[:, 0]
        kept = np.array([0, 1, 1, 1, 0]) if top_k == 3 else np.ones(5)
        expected = kept * np.exp(logits / temperature) if temperature else np.eye(5)[1]
        expected = expected / expected.sum()
        found = np.bincount(np.asarray(out), minlength=5) / 4000
        # five standard errors of a frequency
        assert (np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / 4000)).all()


def test_a_text_has_a_start_and_an_end_and_comes_in_pieces() -> None:
    """Ids are put before a prompt once, and sampling an end id stops generation."""
    model, settings = cached("plain", positions="learned"), {"tokens": 9, "seed": 3}
    writer = Writer(model, BYTES, CONTEXT)
    whole = writer("abc", **settings)
    started = Writer(model, BYTES, CONTEXT, start=tuple(b"ab"))
    assert started("c", **settings) == started("abc", **settings) == whole
    assert "".join(started.stream("c", **settings)) == whole
    with pytest.raises(RecipeError, match="--prompt: expected at least one character"):
        writer("", **settings)
    ending = ByteTokenizer()
    ending.eos = ord("c")  # begins a text without a prompt
    assert Writer(model, ending, CONTEXT)("", **settings) == writer("c", **settings)
    rest = "".join(writer.stream("abc", echo=False, **settings))
    assert rest == writer("abc", echo=False, **settings)
    assert "abc" + rest == whole
    end = next(character for character in rest if ord(character) < 128)
    ended = Writer(model, BYTES, CONTEXT, ends=(ord(end), 999))
    assert ended("abc", **settings) == whole[: whole.index(end, 3)]
    pieces = list(writer.stream("naïve", **settings))  # no part of a character
    assert "".join(pieces) == writer("naïve", **settings)
    assert pieces[0] == "naïve"
    assert len(pieces) > 2


@pytest.mark.parametrize("tied", [False, True])
def test_padding_of_the_vocabulary_is_never_drawn(tied: bool) -> None:
    """Padding is not sampled even if its weights are the largest."""
    cached.cache_clear()
    model = cached("unitscale", vocab=11, vocab_multiple=16, tied_readout=tied)
    variable = model.embed.embedding if tied else model.readout.kernel
    padding = np.s_[11:] if tied else np.s_[:, 11:]
    variable.set_value(variable.get_value().at[padding].set(100.0))
    logits = jitted(model)(np.arange(8, dtype=np.int32)[None])
    assert logits.shape == (1, 8, 11)
    assert np.abs(logits).max() < 50


@pytest.mark.slow
def test_a_prompt_is_read_from_its_last_document() -> None:
    model = cached("unitscale", document_end=ord("."))
    writer = Writer.of_run(model, BYTES, 6)
    assert writer.ends == (ord("."),)
    settings: dict[str, Any] = {"tokens": 2, "seed": 0, "temperature": 0.0, "echo": False}
    for prompt, visible in {"ab.c": "c", "a.b.": "."}.items():
        assert writer(prompt, **settings) == writer(visible, **settings)
    joined = Writer.of_run(cached("unitscale"), BYTES, 6)
    assert joined.ends == ()
    assert joined("abyc", **settings) != joined("c", **settings)


LLAMA = CONFIGS / "llama" / "finetune.yaml"


# Sizes are multiples of 16, which FP8 kernels take: those of the shared folder, and of these.
SIZES = {16: 32, 24: 32, 12: 16}
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a random one-layer Llama with gains of 1, biases of 0 and small matrices."""
    draw = np.random.default_rng(0)

    def drawn(name: str, old: np.ndarray) -> np.ndarray:
        shape = tuple(SIZES.get(n, n) for n in old.shape)
        vector = np.full(shape, float("norm" in name), np.float32)
        return draw.normal(0, 0.1, shape).astype(np.float32) if old.ndim > 1 else vector

    path = one_layer(copied("llama3", tmp_path))
    change_config(path, **SHAPE)
    change_tensors(path, lambda tensors: {name: drawn(name, old) for name, old in tensors.items()})
    return path


def llama(folder: Path, *words: str) -> Any:
    """Load configs/llama/finetune.yaml with a small text and the given folder."""
    (folder.parent / "text.txt").write_text(TEXT, "utf-8")
    small = [
        f"init={folder}",
        f"data.path={folder.parent / 'text.txt'}",
        "data.sequence_length=16",
        "data.batch_size=4",
        f"train.runs_dir={folder.parent / 'runs'}",
        "train={steps: 8, log_every: 1, eval_every: 4, eval_batches: 2, checkpoint_every: 4}",
        "train.sample_tokens=0",
        "optimizer.warmup_steps=0",
        "optimizer.learning_rate=1.0e-2",
        "precision.min_size=0",
    ]
    return load_config(LLAMA, [*small, *words])


@pytest.mark.slow
def test_it_learns_resumes_and_writes_a_folder(folder: Path) -> None:
    config: RunConfig = llama(folder, "name=whole")
    outcome = resumes_bit_for_bit(config, llama(folder, "name=stopped"))
    rows = read_metrics(outcome.folder / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[0] == pytest.approx(math.log(300), rel=0.2)
    assert max(losses[-2:]) < losses[0] - 0.5
    (folder / "model.safetensors").unlink()  # the checkpoint has the weights from here on
    _, state = load_trained(config, pytest.fail)
    kept = jax.tree.leaves(state.params, is_leaf=is_scaled)
    tuned = jax.tree.leaves(load(outcome.folder / "pretrained").params)
    assert {leaf.dtype.name for leaf in kept} == {"float16"}
    for own, written in zip(kept, tuned, strict=True):
        np.testing.assert_array_equal(own.value, written)


WRONG = {
    "lora={}": r"precision\.matmuls .* needs lora null",
    "lora={} precision.matmuls=null": r"precision\.weights",
    "precision.matmuls=qwix": "qwix cannot be combined with init",
}


def test_what_does_not_go_together(folder: Path) -> None:
    for words, message in WRONG.items():
        with pytest.raises(RecipeError, match=message):
            llama(folder, *words.split())

"""Generation with the cache gives the tokens of the model without a cache."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.config import GPTModelConfig
from recipes.gpt.generate import Writer, draw
from recipes.gpt.task import GPT
from recipes.hf import plain
from recipes.text import ByteTokenizer

BYTES, CONTEXT = ByteTokenizer(), 12


@functools.cache
def make(library: str, **shape: Any) -> Any:
    small = {"vocab": 256, "width": 16, "layers": 1, "heads": 4, "context": CONTEXT}
    config = GPTModelConfig.model_validate(small | shape)
    if library == "unitscale":
        return GPT(config, policy="float32", rngs=nnx.Rngs(0))
    # GPT-2's small weights make every token alike.
    graphdef, params, rest = nnx.split(plain.GPT(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    return nnx.merge(graphdef, jax.tree.map(lambda p: p * 5, params), rest)


def jitted(model: Any) -> Callable[..., Any]:
    graphdef, state = nnx.split(model)

    @jax.jit
    def call(state, ids, cache=None):
        out = nnx.merge(graphdef, state)(ids, cache=cache)
        return jnp.asarray(out) if cache is None else (jnp.asarray(out[0]), out[1])

    return functools.partial(call, state)


IDS = np.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]], np.int32)
TIED = {"positions": "learned", "norm": "layer", "mlp": "gated", "tied_readout": True}
GROUPED = {"kv_heads": 2, "mlp": "gated"}


@pytest.mark.parametrize(
    ("library", "shape"),
    [
        ("unitscale", TIED),
        ("plain", GROUPED),
        pytest.param("unitscale", GROUPED, marks=pytest.mark.slow),
        pytest.param("plain", TIED, marks=pytest.mark.slow),
    ],
)
def test_cached_logits_are_the_uncached_ones(library: str, shape: dict[str, Any]) -> None:
    model = make(library, layers=2, **shape)
    call = jitted(model)
    expected = np.asarray(call(IDS))
    prefill, cache = call(IDS[:, :5], model.init_cache(2, 12))  # longer than needed
    pieces = [prefill]
    for index in range(5, 8):
        logits, cache = call(IDS[:, index : index + 1], cache)
        pieces.append(logits)
    # float32 sums of at most 64 terms in another order, two layers deep
    tolerance = 64 * np.finfo(np.float32).eps * np.abs(expected).max()
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), expected, atol=tolerance, rtol=0)


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


@pytest.mark.parametrize("library", ["plain", pytest.param("unitscale", marks=pytest.mark.slow)])
def test_text_is_that_of_the_uncached_model_also_past_the_context(library: str) -> None:
    model = make(library, positions="learned")
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
    model, settings = make("plain", positions="learned"), {"tokens": 9, "seed": 3}
    writer = Writer(model, BYTES, CONTEXT)
    whole = writer("abc", **settings)
    started = Writer(model, BYTES, CONTEXT, start=tuple(b"ab"))
    assert started("c", **settings) == started("abc", **settings) == whole
    assert "".join(started.stream("c", **settings)) == whole
    rest = "".join(writer.stream("abc", echo=False, **settings))
    assert rest == writer("abc", echo=False, **settings)
    assert "abc" + rest == whole
    end = next(character for character in rest if ord(character) < 128)
    ended = Writer(model, BYTES, CONTEXT, ends=(ord(end), 999))
    assert ended("abc", **settings) == whole[: whole.index(end, 3)]


def test_streamed_characters_of_several_bytes_are_whole() -> None:
    writer, settings = Writer(make("plain"), BYTES, CONTEXT), {"tokens": 6, "seed": 0}
    pieces = list(writer.stream("naïve", **settings))
    assert "".join(pieces) == writer("naïve", **settings)
    assert pieces[0] == "naïve"
    assert len(pieces) > 2


@pytest.mark.parametrize("tied", [False, True])
def test_padding_of_the_vocabulary_is_never_drawn(tied: bool) -> None:
    """Padding is not sampled even if its weights are the largest."""
    make.cache_clear()
    model = make("unitscale", vocab=11, vocab_multiple=16, tied_readout=tied)
    variable = model.embed.embedding if tied else model.readout.kernel
    padding = np.s_[11:] if tied else np.s_[:, 11:]
    variable.set_value(variable.get_value().at[padding].set(100.0))
    logits = jitted(model)(IDS % 11)
    assert logits.shape == (2, 8, 11)
    assert np.abs(logits).max() < 50


def test_a_prompt_is_read_from_its_last_document() -> None:
    model = make("unitscale", document_end=ord("."))
    writer = Writer.of_run(model, BYTES, 6)
    assert writer.ends == (ord("."),)
    settings: dict[str, Any] = {"tokens": 2, "seed": 0, "temperature": 0.0, "echo": False}
    for prompt, visible in {"ab.c": "c", "a.b.": "."}.items():
        assert writer(prompt, **settings) == writer(visible, **settings)
    joined = Writer.of_run(make("unitscale"), BYTES, 6)
    assert joined.ends == ()
    assert joined("abyc", **settings) != joined("c", **settings)

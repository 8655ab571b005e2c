"""Generation through the cache draws what the uncached model would."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from recipes.config import GPTModelConfig
from recipes.errors import RecipeError
from recipes.gpt import model as unitscale_gpt
from recipes.gpt.generate import Writer, draw, generate
from recipes.hf import plain
from recipes.text import ByteTokenizer

SHAPES = [
    {},
    {"positions": "learned", "norm": "layer", "mlp": "gated", "tied_readout": True},
    {"kv_heads": 2, "mlp": "gated"},
]


def make(library: str, **shape: Any) -> Any:
    config = GPTModelConfig.model_validate(
        {"vocab": 11, "width": 16, "layers": 2, "heads": 4, "context": 12} | shape
    )
    rngs = nnx.Rngs(0)
    if library == "plain":
        model = plain.GPT(config, rngs=rngs)
        # GPT-2's small weights make every token alike.
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)
        return nnx.merge(graphdef, jax.tree.map(lambda p: p * 5, params), rest)
    return unitscale_gpt.GPT(config, policy="float32", rngs=rngs)


def jitted(model: Any) -> Callable[..., Any]:
    graphdef, state = nnx.split(model)

    @jax.jit
    def call(state, ids, cache=None):
        out = nnx.merge(graphdef, state)(ids, cache=cache)
        return jnp.asarray(out) if cache is None else (jnp.asarray(out[0]), out[1])

    return functools.partial(call, state)


@pytest.fixture(params=["plain", "unitscale"])
def library(request: pytest.FixtureRequest) -> str:
    return request.param


def continued(model: Any, prompt: Any, **options: Any) -> np.ndarray:
    """The prompt with what `generate` adds."""
    return np.concatenate([prompt, *generate(model, prompt, **options)], axis=1)


IDS = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]], jnp.int32)


@pytest.mark.parametrize("shape", SHAPES, ids=["default", "learned", "grouped"])
def test_cached_logits_are_the_uncached_ones(library: str, shape: dict[str, Any]) -> None:
    model = make(library, **shape)
    call = jitted(model)
    expected = np.asarray(call(IDS))
    cache = model.init_cache(2, 12)  # longer than needed
    prefill, cache = call(IDS[:, :5], cache)
    pieces = [prefill]
    for index in range(5, 8):
        logits, cache = call(IDS[:, index : index + 1], cache)
        pieces.append(logits)
    # float32 sums of at most 64 terms in another order, two layers deep
    tolerance = 64 * np.finfo(np.float32).eps * np.abs(expected).max()
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), expected, atol=tolerance, rtol=0)


def test_greedy_is_argmax_of_the_uncached_model(library: str) -> None:
    model = make(library)
    call = jitted(model)
    expected = np.zeros((2, 9), np.int32)  # of one shape; what is yet to come is not looked at
    expected[:, :3] = IDS[:, :3]
    for end in range(3, 9):
        expected[:, end] = np.asarray(call(jnp.asarray(expected)))[:, end - 1].argmax(-1)
    out = continued(model, IDS[:, :3], tokens=6, key=jax.random.key(0), temperature=0.0)
    np.testing.assert_array_equal(out, expected)


def test_draws_follow_the_softmax(library: str) -> None:
    """Frequencies of the first token over many copies of one prompt."""
    model = make(library)
    prompt = jnp.tile(IDS[:1, :4], (4000, 1))
    logits = jitted(model)(prompt[:1])[0, -1].astype(jnp.float32)
    for temperature, top_k in ((1.0, None), (2.0, 3)):
        out = continued(
            model, prompt, tokens=1, key=jax.random.key(1), temperature=temperature, top_k=top_k
        )
        kept = logits if top_k is None else jnp.where(logits >= jnp.sort(logits)[-3], logits, -1e9)
        expected = np.asarray(jax.nn.softmax(kept / temperature))
        found = np.bincount(np.asarray(out[:, -1]), minlength=11) / 4000
        # five standard errors of a frequency
        assert (np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / 4000)).all()


def test_no_more_than_the_likeliest_are_drawn() -> None:
    """Where others are as likely."""
    logits, keys = jnp.array([[1.0, 3.0, 3.0, 3.0, 0.0]]), jax.random.split(jax.random.key(0), 50)
    for top_k, expected in ((1, {1}), (2, {1, 2}), (4, {0, 1, 2, 3}), (9, {0, 1, 2, 3, 4})):
        pick = functools.partial(draw, logits, temperature=2.0, top_k=top_k)
        assert {int(pick(key)[0]) for key in keys} == expected
        assert pick(keys[0]).dtype == jnp.int32


def test_text_goes_on_past_the_context() -> None:
    model = make("plain", vocab=256, positions="learned")
    tokenizer = ByteTokenizer()
    writer, settings = Writer(model, tokenizer, 12), {"seed": 0, "temperature": 0.0}
    text = writer("a prompt longer than it", tokens=40, **settings)
    assert text.startswith("a prompt longer than it")
    # greedy: the first 1 token sees the last 11 of the prompt
    first = continued(
        model,
        jnp.asarray(tokenizer.encode("a prompt longer than it")[-11:].astype(np.int32))[None],
        tokens=1,
        key=jax.random.key(0),
        temperature=0.0,
    )
    one = writer("a prompt longer than it", tokens=1, **settings)
    assert one == "a prompt longer than it" + tokenizer.decode(np.asarray(first)[0, -1:])


def test_a_text_has_a_start_and_an_end() -> None:
    """Ids that come first, once, and ids that end it where they are drawn."""
    model, tokenizer = make("plain", vocab=256), ByteTokenizer()
    settings = {"tokens": 12, "seed": 3, "temperature": 1.0}
    start, prompt = tuple(b"ab"), np.frombuffer(b"abc", np.uint8).astype(np.int32)
    started = Writer(model, tokenizer, 40, start=start)
    whole = started("c", **settings)
    assert whole == Writer(model, tokenizer, 40)("abc", **settings)
    assert started("abc", **settings) == whole
    draws = jax.random.split(jax.random.key(3))[1]
    drawn = continued(model, jnp.asarray(prompt)[None], tokens=12, key=draws)[0, 3:]
    assert whole == tokenizer.decode(np.concatenate([prompt, drawn]))
    end = int(drawn[5])
    first = int(np.flatnonzero(drawn == end)[0])
    ended = Writer(model, tokenizer, 40, start=start, ends=(end, 999))
    assert ended("c", **settings) == tokenizer.decode(np.concatenate([prompt, drawn[:first]]))


def test_streamed_text_comes_in_pieces() -> None:
    """Also past the context; characters of several bytes are whole."""
    model, tokenizer = make("plain", vocab=256), ByteTokenizer()
    writer, settings = Writer(model, tokenizer, 12), {"tokens": 30, "seed": 0}
    pieces = list(writer.stream("naïve", **settings))
    assert "".join(pieces) == writer("naïve", **settings)
    assert pieces[0] == "naïve"
    assert len(pieces) > 5
    rest = "".join(writer.stream("naïve", echo=False, **settings))
    assert rest == writer("naïve", echo=False, **settings)


def test_text_needs_a_context_of_two() -> None:
    with pytest.raises(RecipeError, match="needs a context of at least 2; got 1"):
        Writer(make("plain"), ByteTokenizer(), 1)("x", tokens=1, seed=0)


@pytest.mark.parametrize("tied", [False, True])
def test_padding_of_the_vocabulary_is_never_drawn(tied: bool) -> None:
    """Not even if it held the largest numbers: logits are those of the vocabulary."""
    model = make("unitscale", vocab_multiple=16, tied_readout=tied)
    variable = model.embed.embedding if tied else model.readout.kernel
    rows, columns = variable.shape
    padding = (slice(11, rows),) if tied else (slice(None), slice(11, columns))
    variable.set_value(variable.get_value().at[padding].set(100.0))
    prompt, key = jnp.array([[1, 2], [3, 4]]), jax.random.key(0)
    found = continued(model, prompt, tokens=8, key=key, temperature=1e6)
    assert found.max() < 11
    assert len(np.unique(found)) > 4


def test_a_prompt_is_read_from_its_last_document() -> None:
    model, tokenizer = make("unitscale", vocab=256, document_end=ord(".")), ByteTokenizer()
    writer = Writer.of_run(model, tokenizer, 6)
    assert writer.ends == (ord("."),)
    settings: dict[str, Any] = {"tokens": 4, "seed": 0, "temperature": 0.0, "echo": False}
    for prompt, visible in {"ab.cd": "cd", "a.b.": "."}.items():
        assert writer(prompt, **settings) == writer(visible, **settings)
    joined = Writer.of_run(make("unitscale", vocab=256), tokenizer, 6)
    assert joined.ends == ()
    assert joined("ab.cd", **settings) != joined("cd", **settings)

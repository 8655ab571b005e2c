"""Text from a trained model: the prompt in one pass, then a token at a time through the cache."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..errors import RecipeError
from ..text import Tokenizer


def generate(
    model: nnx.Module,
    prompt: jax.Array,
    *,
    tokens: int,
    key: jax.Array,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> jax.Array:
    """Continues each prompt of a batch by some tokens.

    Args:
      model: Has `init_cache(batch, length)` and `model(ids, cache=...) -> (logits, cache)`.
      prompt: int32 (batch, time), time at least 1.
      tokens: How many to add, at least 1.
      key: PRNG key of the draws.
      temperature: Divides the logits; 0 takes the most likely token.
      top_k: Draws from the k most likely tokens only.

    Returns:
      int32 (batch, time + tokens).
    """
    graphdef, state = nnx.split(model)
    new = _continue(graphdef, state, prompt, key, jnp.float32(temperature), tokens, top_k)
    return jnp.concatenate([prompt, new], axis=1)


@functools.partial(jax.jit, static_argnums=(0, 5, 6))
def _continue(graphdef, state, prompt, key, temperature, tokens, top_k):
    model = nnx.merge(graphdef, state)
    batch, time = prompt.shape
    # The last token drawn is never fed back, so it needs no place in the cache.
    cache = model.init_cache(batch, time + tokens - 1)
    logits, cache = model(prompt, cache=cache)

    def step(carry, key):
        logits, cache = carry
        token = _draw(logits, key, temperature, top_k)
        logits, cache = model(token[:, None], cache=cache)
        return (_last(logits), cache), token

    keys = jax.random.split(key, tokens)
    (logits, _), drawn = jax.lax.scan(step, (_last(logits), cache), keys[:-1])
    final = _draw(logits, keys[-1], temperature, top_k)
    return jnp.concatenate([drawn, final[None]], axis=0).T


def stream(
    model: nnx.Module,
    prompt: jax.Array,
    *,
    tokens: int,
    key: jax.Array,
    temperature: float = 1.0,
    top_k: int | None = None,
) -> Iterator[jax.Array]:
    """The tokens that `generate` adds, int32 (batch, 1), each as soon as it is drawn."""
    graphdef, state = nnx.split(model)
    logits, cache = _read(graphdef, state, prompt, tokens)
    for draws in jax.random.split(key, tokens):
        logits, cache, token = _step(
            graphdef, state, logits, cache, draws, jnp.float32(temperature), top_k
        )
        yield token


@functools.partial(jax.jit, static_argnums=(0, 3))
def _read(graphdef, state, prompt, tokens):
    model = nnx.merge(graphdef, state)
    cache = model.init_cache(prompt.shape[0], prompt.shape[1] + tokens)
    logits, cache = model(prompt, cache=cache)
    return _last(logits), cache


@functools.partial(jax.jit, static_argnums=(0, 6))
def _step(graphdef, state, logits, cache, key, temperature, top_k):
    token = _draw(logits, key, temperature, top_k)[:, None]
    logits, cache = nnx.merge(graphdef, state)(token, cache=cache)
    return _last(logits), cache, token


def _last(logits) -> jax.Array:
    """float32 logits (batch, vocab) of the last token, from an array or a ScaledArray."""
    return jnp.asarray(logits)[:, -1].astype(jnp.float32)


def _draw(logits, key, temperature, top_k):
    tokens = jnp.broadcast_to(jnp.arange(logits.shape[-1]), logits.shape)
    if top_k is not None and top_k < logits.shape[-1]:
        logits, tokens = jax.lax.top_k(logits, top_k)  # of equal ones those that come first
    greedy = jnp.argmax(logits, axis=-1)
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    place = jnp.where(temperature > 0, jax.random.categorical(key, scaled, axis=-1), greedy)
    return jnp.take_along_axis(tokens, place[:, None], axis=-1)[:, 0].astype(jnp.int32)


def writes(model: nnx.Module) -> bool:
    """Whether a model continues text: it has a cache for the tokens before."""
    return hasattr(model, "init_cache")


class Writer(NamedTuple):
    """A model with what it needs to continue a text.

    Attributes:
      model: As for `generate`.
      tokenizer: Of the model.
      context: The longest sequence that the model has seen.
      whole: Whether the cache always has room for the whole context, so that few shapes are
        compiled; otherwise for no more than is asked for.
      start: Ids before every prompt, unless it starts with them itself.
      ends: Ids that end the text where one is drawn.
      document_end: The id past which the model does not look back; what a prompt has before the
        last one is not read.
    """

    model: nnx.Module
    tokenizer: Tokenizer
    context: int
    whole: bool = True
    start: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    document_end: int | None = None

    @classmethod
    def of_run(cls, model: Any, tokenizer: Tokenizer, context: int) -> Self:
        """For a model that was trained on windows of `context` tokens."""
        end = model.config.document_end
        return cls(model, tokenizer, context, ends=() if end is None else (end,), document_end=end)

    def __call__(self, prompt: str, *, echo: bool = True, **options: Any) -> str:
        """Continues a text, past the context that the model was trained on if need be.

        When the context is full, its second half becomes the prompt of the next stretch.

        Args:
          prompt: Text to continue; its last `context - 1` tokens are used.
          echo: Whether the prompt is part of what is returned.
          options: `tokens`, how many to add, fewer where one of `ends` is drawn; `seed`, which
            decides the draws; `temperature` and `top_k` as for `generate`.
        Raises:
          RecipeError: An empty prompt, or a context of one token.
        """
        ids = self._encoded(prompt)
        return self.tokenizer.decode(
            np.concatenate([ids[: ids.size if echo else 0], *self._drawn(ids, _at_once, **options)])
        )

    def stream(self, prompt: str, *, echo: bool = True, **options: Any) -> Iterator[str]:
        """The same text in pieces, each as soon as its characters are known."""
        ids = self._encoded(prompt)
        shown, said, text = ids[: ids.size if echo else 0], "", ""
        for new in itertools.chain([ids[:0]], self._drawn(ids, stream, **options)):
            shown = np.concatenate([shown, new])
            text = self.tokenizer.decode(shown)
            # What ends in the middle of a character waits for the rest of it.
            if text.startswith(said) and not text.endswith("\ufffd"):
                yield text[len(said) :]
                said = text
        yield text[len(said) :]

    def _encoded(self, prompt: str) -> np.ndarray:
        """The ids of a prompt, int32, with those that come first."""
        tokenizer, start = self.tokenizer, np.asarray(self.start, np.int32)
        ids = tokenizer.encode(prompt).astype(np.int32)
        if not np.array_equal(ids[: start.size], start):
            ids = np.concatenate([start, ids])
        if prompt and not ids.size and tokenizer.eos is not None:
            ids = np.array([tokenizer.eos], np.int32)  # white space to WordPiece: start a document
        if not ids.size:
            raise RecipeError("--prompt: expected at least one character; got an empty prompt")
        return ids

    def _last_document(self, ids: np.ndarray) -> np.ndarray:
        """What the model looks back at; the end itself where nothing follows it."""
        if self.document_end is None:
            return ids
        ends = np.flatnonzero(ids == self.document_end)
        return ids[min(ends[-1] + 1, ids.size - 1) :] if ends.size else ids

    def _drawn(
        self,
        ids: np.ndarray,
        draw: Callable[..., Iterable[jax.Array]],
        *,
        tokens: int,
        seed: int,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> Iterator[np.ndarray]:
        """New ids as they come, up to the number of tokens or to one of `ends`."""
        context = self.context if self.whole else min(self.context, ids.size + tokens)
        if context < 2:
            raise RecipeError(
                f"data.sequence_length: generation needs a context of at least 2; got {context}"
            )
        key, window = jax.random.key(seed), context - 1
        while tokens:
            key, draws = jax.random.split(key)
            visible = self._last_document(ids)[-window:]
            pieces = draw(
                self.model,
                jnp.asarray(visible)[None],
                tokens=context - visible.size,  # whole windows: few shapes are compiled
                key=draws,
                temperature=temperature,
                top_k=top_k,
            )
            for piece in pieces:
                new = np.asarray(piece)[0, :tokens]
                ended = np.isin(new, self.ends)
                if ended.any():
                    yield new[: ended.argmax()]
                    return
                yield new
                ids, tokens = np.concatenate([ids, new]), tokens - new.size
                if not tokens:
                    return
            window = max(1, context // 2)


def _at_once(model: nnx.Module, prompt: jax.Array, **options: Any) -> list[jax.Array]:
    """All that `generate` adds, in one piece."""
    return [generate(model, prompt, **options)[:, prompt.shape[1] :]]

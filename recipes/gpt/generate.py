"""Generate text: one pass over the prompt, then one token at a time with the KV cache."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..errors import RecipeError
from ..run.probe import unrolled
from ..text import Tokenizer


@functools.partial(jax.jit, static_argnums=(0, 3))
def _read(graphdef, state, prompt, tokens):
    model = nnx.merge(graphdef, state)
    cache = model.init_cache(prompt.shape[0], prompt.shape[1] + tokens)
    logits, cache = model(prompt, cache=cache)
    return _last(logits), cache


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=3)
def _step(graphdef, state, logits, cache, key, temperature, top_k):
    token = draw(logits, key, temperature, top_k)[:, None]
    logits, cache = nnx.merge(graphdef, state)(token, cache=cache)
    return _last(logits), cache, token


def _last(logits) -> jax.Array:
    """Return the float32 logits (batch, vocab) of the last token."""
    return jnp.asarray(logits)[:, -1].astype(jnp.float32)


def draw(logits: jax.Array, key: jax.Array, temperature: Any, top_k: int | None) -> jax.Array:
    """Sample int32 tokens (batch,) from logits (batch, vocab)."""
    tokens = jnp.broadcast_to(jnp.arange(logits.shape[-1]), logits.shape)
    if top_k is not None:
        logits, tokens = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)
    place = jnp.where(temperature > 0, jax.random.categorical(key, scaled), logits.argmax(-1))
    return jnp.take_along_axis(tokens, place[:, None], axis=-1)[:, 0].astype(jnp.int32)


class Writer(NamedTuple):
    """A model that continues text, with its tokenizer."""

    model: nnx.Module
    tokenizer: Tokenizer
    context: int  # length of the longest sequence
    start: tuple[int, ...] = ()  # ids to put before prompts
    ends: tuple[int, ...] = ()  # ids after which to stop
    document_end: int | None = None  # the model reads only what follows the last one in a prompt

    @classmethod
    def of_run(cls, model: Any, tokenizer: Tokenizer, context: int) -> Self:
        """Make a writer for a model that was trained on windows of `context` tokens."""
        end = model.config.document_end
        model = unrolled(model)  # a scan would copy every weight for each token
        return cls(model, tokenizer, context, ends=() if end is None else (end,), document_end=end)

    def __call__(self, prompt: str, *, echo: bool = True, **options: Any) -> str:
        """Continue a text; options: `tokens`, `seed`, `temperature` (0: no sampling), `top_k`."""
        ids = self._encoded(prompt)
        return self.tokenizer.decode([*ids[: ids.size if echo else 0], *self._new(ids, **options)])

    def stream(self, prompt: str, *, echo: bool = True, **options: Any) -> Iterator[str]:
        """Yield the same text in pieces, each as soon as its characters are complete."""
        ids = self._encoded(prompt)
        shown, said, text = [*ids] if echo else [], "", ""
        for new in itertools.chain([[]], ([token] for token in self._new(ids, **options))):
            shown += new
            text = self.tokenizer.decode(shown)
            # Wait for the last byte of a character.
            if text.startswith(said) and not text.endswith("\ufffd"):
                yield text[len(said) :]
                said = text
        yield text[len(said) :]

    def _encoded(self, prompt: str) -> np.ndarray:
        """Encode a prompt as int32 ids, with `start` in front; without any, begin a document."""
        whole = prompt.encode("utf-8", "replace").decode("utf-8")  # without surrogates
        ids = self.tokenizer.encode(whole).astype(np.int32)
        if tuple(ids[: len(self.start)]) != self.start:
            ids = np.concatenate([np.asarray(self.start, np.int32), ids])
        if not ids.size and self.tokenizer.eos is None:
            raise RecipeError("--prompt: expected at least one character; got an empty prompt")
        return ids if ids.size else np.array([self.tokenizer.eos], np.int32)

    def _new(
        self, ids: np.ndarray, *, tokens: int, seed: int, temperature=1.0, top_k=None
    ) -> Iterator[int]:
        """Yield `tokens` new ids, or fewer if one of `ends` is sampled."""
        graphdef, state = nnx.split(self.model)
        context = max(2, min(self.context, ids.size + tokens))
        key, most = jax.random.key(seed), context - 1
        while tokens:
            key, draws = jax.random.split(key)
            ends = np.flatnonzero(ids == self.document_end)
            start = ends[-1] + 1 if ends.size else 0
            visible = ids[min(start, ids.size - 1) :][-most:]  # the end itself if nothing follows
            # When the context is full, continue with its second half as the prompt.
            room, most = context - visible.size, max(1, context // 2)
            logits, cache = _read(graphdef, state, visible[None], room)
            for one in jax.random.split(draws, room):
                options = one, jnp.float32(temperature), top_k
                logits, cache, token = _step(graphdef, state, logits, cache, *options)
                new = int(token[0, 0])
                if new in self.ends:
                    return
                yield new
                ids, tokens = np.append(ids, np.int32(new)), tokens - 1
                if not tokens:
                    return

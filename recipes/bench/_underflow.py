"""Which gradients a format loses: entries that are zero in float16 and not in float32."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..gpt.config import GPTConfig
from ..gpt.task import build
from ..run.batch import make_loss, over_amax
from ..run.recipe import recipe_of
from ..run.scaling import plain, under
from ..run.state import TrainState, init_state
from ._runs import last_state

WHEN = "at first", "at the end"
BATCHES = 8
HALVINGS = 24  # after which a loss scale is below any that a gradient would need


class Underflow(NamedTuple):
    """Counts of gradient entries, over all parameters and batches.

    `entries` in all, `lost` that are zero in float16 but not in float32, `subnormal` that are not
    zero but below float16's least normal number, `not_finite` in float16. `lost_absent` of the lost
    belong to the readout of tokens that the training text never has: their probability, and with it
    their gradient, goes to zero as the model learns that they do not occur.
    """

    entries: int
    lost: int
    subnormal: int
    not_finite: int
    lost_absent: int

    @property
    def lost_share(self) -> float:
        return self.lost / self.entries

    @property
    def lost_occurring_share(self) -> float:
        return (self.lost - self.lost_absent) / self.entries


class Sample(NamedTuple):
    """Windows of validation text, and (vocab,) bool: the tokens that the training text lacks."""

    batches: list[Any]
    absent: np.ndarray

    @classmethod
    def of(cls, config: GPTConfig) -> Self:
        """Some of the text of a run."""
        corpus: Any = recipe_of(config).load_data(config)
        tokens = np.asarray(corpus.train_tokens)
        absent = np.bincount(tokens, minlength=config.model.vocab) == 0
        return cls(list(corpus.validation(BATCHES)), absent)

    def __str__(self) -> str:
        return (
            f"{len(self.batches)} batches. Without absent: less those in the readout of the "
            f"{int(self.absent.sum())} tokens that the training text never has."
        )


def lost_gradients(config: GPTConfig, sample: Sample) -> list[Underflow]:
    """Underflow of a trained run's gradients, with its first parameters and with its last.

    Both formats start from the same float32 parameters; dropout is left out. A loss scale is that
    of the run; before it, the first without overflow.
    """
    shape = config.model.model_copy(update={"products": None})
    exact = config.model_copy(update={"policy": "float32", "scalify": None, "model": shape})
    wide, _, rest = nnx.split(build(exact), nnx.Param, ...)
    reference = jax.jit(gradient(wide))
    graphdef, _, first = init_state(config)
    rounded = under(config.scalify, gradient(graphdef))
    narrow = jax.jit(lambda *args: plain(config.scalify, rounded(*args)[1]))

    def count(state: TrainState, scale: Any) -> Underflow:
        params = plain(config.scalify, state.params)
        exact = (reference(params, rest, batch, None)[1] for batch in sample.batches)
        half = (narrow(state.params, state.rest, batch, scale) for batch in sample.batches)
        return counted(zip(exact, half, strict=True), sample.absent)

    last, constant = last_state(config), config.optimizer.loss_scale
    if first.loss_scale is None or last.loss_scale is None:
        return [count(state, constant) for state in (first, last)]
    scale = first.loss_scale.value
    for _ in range(HALVINGS):
        found = count(first, scale)
        if not found.not_finite:
            break
        scale = scale / 2
    return [found, count(last, last.loss_scale.value)]


def gradient(graphdef: nnx.GraphDef) -> Callable[..., tuple[jax.Array, Any]]:
    """Loss and gradient without dropout: `(params, rest, batch, scale)`, a loss scale or None."""

    value_of = make_loss(graphdef)

    def compute(params, rest, batch, scale):
        amax, of_amax = over_amax(value_of, rest)

        def loss(params, amax):
            value = of_amax(params, amax, batch)
            return value if scale is None else value * scale

        value, (grads, _) = jax.value_and_grad(loss, (0, 1))(params, amax)
        return value, grads if scale is None else jax.tree.map(lambda g: g / scale, grads)

    return compute


def counted(pairs: Iterable[tuple[Any, Any]], absent: np.ndarray) -> Underflow:
    """Counts over pairs of gradients, of the same parameters: without rounding, and with it."""
    counts = [_counts(exact, half, absent) for exact, half in pairs]
    return Underflow(*(sum(column) for column in zip(*counts, strict=True)))


def _counts(wide: Any, narrow: Any, absent: np.ndarray) -> tuple[int, ...]:
    paths, reference = zip(*jax.tree_util.tree_leaves_with_path(wide), strict=True)
    tiny = float(jnp.finfo(jnp.float16).tiny)
    lost = subnormal = not_finite = lost_absent = 0
    for path, exact, half in zip(paths, reference, jax.tree.leaves(narrow), strict=True):
        exact, half = np.asarray(exact), np.asarray(half)
        gone = (half == 0) & (exact != 0)
        lost += int(np.count_nonzero(gone))
        if "readout" in jax.tree_util.keystr(path):
            lost_absent += int(np.count_nonzero(gone[..., absent]))
        subnormal += int(np.count_nonzero((half != 0) & (np.abs(half) < tiny)))
        not_finite += int(np.count_nonzero(~np.isfinite(half)))
    return sum(leaf.size for leaf in reference), lost, subnormal, not_finite, lost_absent

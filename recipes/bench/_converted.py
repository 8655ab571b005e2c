"""The GPT in plain `flax.nnx`, its layers' products in FP8 by `quant.convert` and by qwix."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from unitscale.quant import convert

from ..gpt import build
from ..gpt.config import GPTConfig
from ..run.evaluate import make_evaluation, mean_loss
from ..run.optimizer import make_optimizer
from ..run.state import TrainState
from ..text import ByteTokenizer, Corpus, load_corpus
from ..train import make_train_step
from ._table import Table, within

MISSING = "not installed: pip install qwix"
LAYERS = "layers.*"
PRESETS = ("fp8_dynamic", "fp8_delayed")


def has_qwix() -> bool:
    """Whether qwix is installed."""
    return importlib.util.find_spec("qwix") is not None


def converted(config: GPTConfig, preset: str) -> Any:
    """The plain model, all layers but the readout converted."""
    model = build(config)
    convert(model, {LAYERS: preset})
    return model


def through_qwix(config: GPTConfig) -> Any:
    """The plain model, the same layers through qwix: E4M3, cotangents E5M2, scales by channel."""
    qwix: Any = importlib.import_module("qwix")
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    rule = qwix.QtRule(
        # The path of a layer with a weight: attention's own products are left alone.
        module_path=r"layers/\d+/\w+/\w+",
        weight_qtype=e4m3,
        act_qtype=e4m3,
        bwd_qtype=e5m2,
    )
    ids = jnp.zeros((1, config.data.sequence_length), jnp.int32)
    return qwix.quantize_model(build(config), qwix.QtProvider([rule]), ids)


def validation_loss(config: GPTConfig, make: Callable[[], Any], corpus: Corpus) -> float:
    """Trains a model on the batches of a config; the loss over all validation text."""
    graphdef, params, rest = nnx.split(make(), nnx.Param, ...)
    optimizer = make_optimizer(config, params)
    state = TrainState(params, rest, optimizer.init(params), jnp.zeros((), jnp.int32))
    step = make_train_step(graphdef, optimizer)
    batches = corpus.training(config.seed)
    for index in range(config.train.steps):
        state, _ = step(state, next(batches), np.int32(index))
    done = int(state.step)
    assert done == config.train.steps, f"step {done + 1} was not finite"
    return mean_loss(make_evaluation(graphdef), state.params, state.rest, corpus.validation())


def losses(config: GPTConfig, seeds: int = 1) -> Table:
    """Validation loss of the plain model, converted by us and by qwix, after the same steps.

    Args:
      config: Of the plain model in float32.
      seeds: How many runs of each, with the seed of the config and those after it.
    """
    corpus = load_corpus(config.data, ByteTokenizer())
    programs: dict[str, Callable[[GPTConfig], Any]] = {"float32": build}
    for preset in PRESETS:
        programs[f"converted to {preset}"] = functools.partial(converted, preset=preset)
    if has_qwix():
        programs["through qwix"] = through_qwix
    found = {}
    for name, make in programs.items():
        Console(stderr=True).print(f"training the plain model: {name}", highlight=False)
        runs = (config.model_copy(update={"seed": config.seed + i}) for i in range(seeds))
        found[name] = [validation_loss(one, functools.partial(make, one), corpus) for one in runs]
        jax.clear_caches()
    return judged(found, config.train.steps)


def judged(found: dict[str, list[float]], steps: int) -> Table:
    """Mean loss over float32, and whether it is no worse than that of qwix.

    Seed by seed; with more than one, worse is more than two standard errors of the mean above.
    """
    bound = found.get("through qwix")
    rows: list[dict[str, Any]] = []
    for name, runs in found.items():
        row: dict[str, Any] = {"model": name, "validation loss": statistics.fmean(runs)}
        if name != "float32":
            row["over float32"] = statistics.fmean(_over(runs, found["float32"]))
        if name.startswith("converted") and bound is not None:
            over = _over(runs, bound)
            mean = statistics.fmean(over)
            error = statistics.stdev(over) / len(over) ** 0.5 if len(over) > 1 else 0.0
            row |= {"over qwix": mean, "standard error": error, "asked": "<= qwix"}
            row["within"] = within(mean, (None, 2 * error))
        rows.append(row)
    if bound is None:
        rows.append({"model": "through qwix", "asked": MISSING})
    columns = {"model": "", "validation loss": ".5f", "over float32": "+.3%", "over qwix": "+.3%"}
    columns |= {"standard error": ".3%", "asked": "", "within": ""}
    seeds = len(found["float32"])
    title = f"Validation loss of the GPT in plain flax.nnx, {steps} steps, mean of {seeds} seeds"
    return Table(title, columns, rows)


def _over(runs: list[float], others: list[float]) -> list[float]:
    return [run / other - 1 for run, other in zip(runs, others, strict=True)]

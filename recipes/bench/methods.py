"""Ways to train in float16, on one model: what each loses, what it costs, what is to be chosen.

    python -m recipes bench methods --data TEXT

Trains the GPT of `configs/gpt/parity.yaml` in float16 in plain `flax.nnx` with no loss scale, with
a constant and with an automatic one, with FP8 products whose scales follow their tensors, and under
scalify; and the same GPT in `unitscale.nn`. Seed and data are the same. A run that is complete in
`train.runs_dir` is used as it is, so that runs are shared with `bench parity` and `bench scalify`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from rich.console import Console

from unitscale.core import is_scaled
from unitscale.quant import AmaxState

from ..gpt import build
from ..gpt.config import GPTConfig
from ..run.scaling import plain
from ..text import Corpus, load_corpus
from ._converted import converted
from ._loss_scale import (
    Scale,
    automatic,
    first_state,
    make_gradient,
    make_step,
    trained_with,
)
from ._runs import (
    PARITY,
    PLAIN,
    ConfigPath,
    DataPath,
    Fresh,
    Overrides,
    PlainRate,
    Run,
    trained,
    variant,
)
from ._steps import random_batch
from ._table import JsonPath, Table, publish
from ._underflow import Underflow, counted, gradient

GRADIENT_BATCHES = 8
FIRST_SCALE = 2.0**16  # of an automatic loss scale, as GradScaler and Flax have it
HALVINGS = 24  # after which it is below any that a gradient would need


class Method(NamedTuple):
    """One way to train.

    `own` methods are trained by `recipes.train`, the others by the loop of `_loss_scale`.
    """

    name: str
    config: GPTConfig
    to_choose: str
    make: Callable[[GPTConfig], Any] = build
    scale: Scale = None
    own: bool = True


def main(
    overrides: Overrides = None,
    config: ConfigPath = str(PARITY),
    data: DataPath = None,
    plain_learning_rate: PlainRate = 1e-3,
    loss_scale: Annotated[float, typer.Option(min=1.0, help="the constant loss scale")] = 2.0**12,
    growth_interval: Annotated[
        int, typer.Option(min=1, help="finite steps after which an automatic loss scale doubles")
    ] = 200,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints loss, lost gradients, cost and settings of methods to train in float16."""
    words = [*(overrides or ()), *([] if data is None else [f"data.path={data}"])]
    rate = f"optimizer.learning_rate={plain_learning_rate}"
    wanted = methods(config, words, rate, loss_scale, growth_interval)
    reference = variant(config, words, "plain-float32", "policy=float32", *PLAIN, rate)
    corpus, console = load_corpus(reference.data), Console()
    batches = list(corpus.validation(GRADIENT_BATCHES))
    absent = np.bincount(np.asarray(corpus.train_tokens), minlength=reference.model.vocab) == 0
    full = trained(reference, corpus, fresh, console).loss
    losses: list[dict[str, Any]] = [{"method": "float32", "validation loss": full}]
    costs = []
    for method in wanted:
        run, scale = _trained(method, corpus, fresh, console)
        row = {
            "method": method.name,
            "validation loss": run.loss,
            "over float32": run.loss / full - 1,
        }
        losses.append(row | shares(method, run, scale, batches, absent))
        costs.append(cost_of(method))
        jax.clear_caches()
    steps = reference.train.steps
    notes = [
        f"{steps} steps of {Path(config).name}, seed {reference.seed}; loss over all validation "
        f"batches. Plain models learn at {plain_learning_rate:g}, unit scaling at the config's own "
        "rate. All are float16; tensor scaling: products of layers in FP8, their scales from amax.",
        f"lost: entries of the gradient of all parameters that are zero and in float32 are not, "
        f"over {len(batches)} batches. Less absent: less those in the readout of the "
        f"{int(absent.sum())} tokens that the training text never has. Automatic: at the first "
        "scale without overflow.",
        "reductions: reduce instructions of the compiled step (gradient and update) on "
        f"{jax.devices()[0].device_kind}. FLOPs: of the step before XLA optimizes it. numbers "
        "kept: what the method carries from step to step.",
    ]
    publish("methods", [Table(*LOSSES, losses), compared(wanted, costs)], json, notes)


LOSSES = (
    "Validation loss in nats per byte, and gradients lost in float16",
    {
        "method": "",
        "validation loss": ".5f",
        "over float32": "+.3%",
        "lost at first": ".4%",
        "less absent at first": ".4%",
        "lost at the end": ".4%",
        "less absent at the end": ".4%",
    },
)


def compared(methods: list[Method], costs: list[Cost]) -> Table:
    """What each method adds to the first, and leaves to be chosen."""
    none = costs[0]
    rows = [
        {
            "method": method.name,
            "reductions": cost.reductions - none.reductions,
            "FLOPs": cost.flops / none.flops - 1,
            "numbers kept": cost.kept,
            "to choose": method.to_choose,
        }
        for method, cost in zip(methods, costs, strict=True)
    ]
    columns = {"method": "", "reductions": "+d", "FLOPs": "+.3%", "numbers kept": ",d"}
    title = f"Added to a step of {none.reductions} reductions and {none.flops:.4g} FLOPs"
    return Table(title, columns | {"to choose": ""}, rows)


def methods(
    path: str, words: list[str], rate: str, loss_scale: float, interval: int
) -> list[Method]:
    """The methods compared, none first."""

    def half(suffix: str) -> GPTConfig:
        return variant(path, words, suffix, "policy=float16", *PLAIN, rate)

    return [
        Method("none", half("plain-float16"), "nothing"),
        Method(
            "static loss scale",
            half(f"loss-scale-{loss_scale:g}"),
            "the scale",
            scale=jnp.asarray(loss_scale, jnp.float32),
            own=False,
        ),
        Method(
            "automatic loss scale",
            half(f"auto-loss-scale-{interval}"),
            "first scale, interval, factor",
            scale=automatic(FIRST_SCALE, interval),
            own=False,
        ),
        Method(
            "tensor scaling",
            half("tensor-scaling"),
            "formats, granularity, layers",
            make=lambda config: converted(config, "fp8_dynamic"),
            own=False,
        ),
        Method("unit scaling", variant(path, words, "float16", "policy=float16"), "nothing"),
        Method(
            "scalify",
            variant(
                path,
                words,
                "scalify-float16",
                "policy=float32",
                *PLAIN,
                rate,
                "scalify={storage: float16}",
            ),
            "nothing",
        ),
    ]


def _trained(method: Method, corpus: Corpus, fresh: bool, console: Console) -> tuple[Run, Scale]:
    if method.own:
        return trained(method.config, corpus, fresh, console), None
    model = method.make(method.config)
    return trained_with(method.config, model, method.scale, corpus, fresh, console)


class Cost(NamedTuple):
    """Of a compiled step: reductions and operations, and numbers it carries for its scales."""

    reductions: int
    flops: float
    kept: int


def cost_of(method: Method) -> Cost:
    """Compiles the step of a method, and counts."""
    config = method.config
    graphdef, optimizer, state = first_state(config, method.make(config), method.scale)
    step = make_step(graphdef, optimizer, config.scalify)
    lowered = step.lower(state, random_batch(config))
    analysis: Any = lowered.cost_analysis()
    text = lowered.compile().as_text() or ""
    return Cost(len(re.findall(r"\breduce\(", text)), float(analysis["flops"]), kept(state))


def kept(state: Any) -> int:
    """Numbers in a state that are there for the sake of scales."""
    of_loss = jax.tree.leaves(state.scale) if isinstance(state.scale, DynamicScale) else []
    amax = jax.tree.leaves(nnx.split_state(state.rest, AmaxState, ...)[0])
    nodes = jax.tree.leaves(state, is_leaf=is_scaled)
    scales = [node.scale for node in nodes if is_scaled(node) and node.scale is not None]
    return sum(np.size(x) for x in (*of_loss, *amax, *scales))


def shares(
    method: Method, run: Run, last: Scale, batches: list, absent: np.ndarray
) -> dict[str, float]:
    """Columns of the gradient entries lost, with a method's first parameters and with its last."""
    config = method.config
    graphdef, _, state = first_state(config, method.make(config), method.scale)
    wide = nnx.graphdef(build(config.model_copy(update={"policy": "float32"})))
    narrow = make_gradient(graphdef, config.scalify)
    if isinstance(method.scale, DynamicScale):
        first = _without_overflow(narrow, state, batches)
    else:
        first = method.scale

    def lost(params: Any, rest: Any, scale: Scale) -> Underflow:
        exact = plain(config.scalify, params)
        others = plain(config.scalify, rest)
        pairs = (
            (gradient(exact, others, batch, wide), narrow(params, rest, batch, scale)[0])
            for batch in batches
        )
        return counted(pairs, absent)

    counts = {
        "at first": lost(state.params, state.rest, first),
        "at the end": lost(run.params, run.rest, last),
    }
    return {f"lost {when}": one.lost_share for when, one in counts.items()} | {
        f"less absent {when}": one.lost_occurring_share for when, one in counts.items()
    }


def _without_overflow(narrow: Callable[..., Any], state: Any, batches: list) -> Scale:
    """The scale that an automatic one comes to on batches, the parameters as they are."""
    scale = state.scale
    for _ in range(HALVINGS):
        results = [narrow(state.params, state.rest, batch, scale) for batch in batches]
        worse = [following for _, following, finite in results if not finite]
        if not worse:
            break
        scale = worse[0]
    return scale

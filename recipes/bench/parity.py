"""What 16 and 8 bits cost: validation loss against float32, and gradients lost in float16.

    python -m recipes bench parity --data TEXT

Trains `configs/gpt/parity.yaml` once for each policy, and the same GPT in plain `flax.nnx` in
float16, all with the same seed and data and none with a loss scale. A run that is complete in
`train.runs_dir` is used as it is, and one that was stopped is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx
from rich.console import Console

from ..gpt import build
from ..gpt.config import GPTConfig
from ..text import load_corpus
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
from ._table import JsonPath, Table, publish, within
from ._underflow import Underflow, underflow

MOST_DIFFERENCE = {"float16": 0.001, "fp8": 0.005}
LEAST_GAIN = 10.0
GRADIENT_BATCHES = 8


def main(
    overrides: Overrides = None,
    config: ConfigPath = str(PARITY),
    data: DataPath = None,
    plain_learning_rate: PlainRate = 1e-3,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints validation loss by number format, and the share of gradients lost in float16."""
    words = [*(overrides or ()), *([] if data is None else [f"data.path={data}"])]
    console = Console()
    wanted = {
        policy: variant(config, words, policy, f"policy={policy}")
        for policy in ("float32", "float16", "fp8")
    }
    wanted["plain"] = variant(
        config,
        words,
        "plain-float16",
        "policy=float16",
        *PLAIN,
        f"optimizer.learning_rate={plain_learning_rate}",
    )
    corpus = load_corpus(wanted["float32"].data)
    runs = {name: trained(one, corpus, fresh, console) for name, one in wanted.items()}
    batches = list(corpus.validation(GRADIENT_BATCHES))
    vocab = wanted["float32"].model.vocab
    absent = np.bincount(np.asarray(corpus.train_tokens), minlength=vocab) == 0
    ours, plain = (lost_gradients(runs[name], batches, absent) for name in ("float16", "plain"))
    steps = wanted["float32"].train.steps
    notes = [
        f"{steps} steps of {Path(config).name}, seed {wanted['float32'].seed}, no loss scale; loss "
        f"over all {sum(1 for _ in corpus.validation())} validation batches.",
        f"Gradients: all parameters, {len(batches)} batches; both formats from the same float32 "
        "parameters. The end is that of each library's own float16 run. Without absent: less those "
        f"in the readout of the {int(absent.sum())} tokens that the training text never has.",
    ]
    publish("parity", [losses(runs), gradients(ours, plain)], json, notes)


def losses(
    runs: Mapping[str, Run],
    most: Mapping[str, float] = MOST_DIFFERENCE,
    title: str = "Validation loss in nats per byte",
) -> Table:
    """Validation loss of each run, and its distance to float32, which `most` bounds."""
    reference = runs["float32"].loss
    rows = []
    for name, run in runs.items():
        row: dict[str, Any] = {
            "library": "plain flax.nnx" if name == "plain" else "unitscale",
            "policy": run.config.policy,
            "validation loss": run.loss,
        }
        if name in most:
            bound, difference = most[name], run.loss / reference - 1
            row["over float32"] = difference
            row["asked"] = f"within {bound:.1%}"
            row["within"] = within(difference, (-bound, bound))
        rows.append(row)
    columns = {
        "library": "",
        "policy": "",
        "validation loss": ".5f",
        "over float32": "+.3%",
        "asked": "",
        "within": "",
    }
    return Table(title, columns, rows)


def lost_gradients(run: Run[GPTConfig], batches: list, absent: np.ndarray) -> dict[str, Underflow]:
    """Underflow of a float16 run's gradients, with its first parameters and with its last."""
    half = build(run.config)
    full = build(run.config.model_copy(update={"policy": "float32"}))
    narrow, params, rest = nnx.split(half, nnx.Param, ...)
    wide = nnx.graphdef(full)
    return {
        "at initialisation": underflow(wide, narrow, params, rest, batches, absent),
        "at the end": underflow(wide, narrow, run.params, run.rest, batches, absent),
    }


def _gain(theirs: float, ours: float) -> float:
    """How many times smaller; nothing lost by them leaves nothing to be gained."""
    if not theirs:
        return float("nan")
    return theirs / ours if ours else float("inf")


def gradients(ours: dict[str, Underflow], plain: dict[str, Underflow]) -> Table:
    """Share of gradient entries that float16 loses, ours beside plain flax.nnx."""
    rows = []
    for when, own in ours.items():
        other = plain[when]
        gain = _gain(other.lost_share, own.lost_share)
        for library, one in (("unitscale", own), ("plain flax.nnx", other)):
            row: dict[str, Any] = {
                "when": when,
                "library": library,
                "entries": one.entries,
                "lost": one.lost,
                "share lost": one.lost_share,
                "without absent": one.lost_occurring_share,
                "share subnormal": one.subnormal_share,
                "not finite": one.not_finite,
            }
            if library == "unitscale":
                row |= {
                    "times smaller": gain,
                    "asked": f">= {LEAST_GAIN:g}",
                    "within": within(gain, (LEAST_GAIN, None)),
                    "without absent, times smaller": _gain(
                        other.lost_occurring_share, own.lost_occurring_share
                    ),
                }
            rows.append(row)
    columns = {
        "when": "",
        "library": "",
        "entries": ",d",
        "lost": ",d",
        "share lost": ".4%",
        "without absent": ".4%",
        "share subnormal": ".4%",
        "not finite": ",d",
        "times smaller": ".1f",
        "asked": "",
        "within": "",
        "without absent, times smaller": ".1f",
    }
    return Table("Gradient entries that are zero in float16 and not in float32", columns, rows)

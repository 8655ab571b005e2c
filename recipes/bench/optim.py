"""What 16- and 8-bit optimizers cost and save: bytes, validation loss, step time.

    python -m recipes bench optim --data TEXT

Bytes are those of the arrays of a GPT-2 small and its optimizer state. The loss is that of
`configs/gpt/parity.yaml`, trained once for each set of formats with the same seed and data. A run
that is complete in `train.runs_dir` is used as it is, and one that was stopped is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer
from flax import nnx
from rich.console import Console

from unitscale.core import is_scaled
from unitscale.optim import scaled

from ..gpt import build
from ..gpt.config import GPTConfig
from ..registry import load_config
from ..run.state import init_state
from ..text import load_corpus
from ._runs import PARITY, ConfigPath, DataPath, Fresh, Overrides, trained, variant
from ._table import JsonPath, Table, publish, within
from ._timing import compared, interleaved

CONFIGS = Path(__file__).parents[2] / "configs" / "gpt"
GPT2 = ("model.vocab=50257", "model.tied_readout=true")
FP8, HALF = "float8_e4m3fn", "float16"

# Name to the overrides that give it.
FORMATS: dict[str, tuple[str, ...]] = {
    "float32": ("policy=float32",),
    "6 bytes": ("optimizer.weights=float16", f"optimizer.moments=[{FP8}, {HALF}]"),
    "6 bytes stochastic": (
        "optimizer.weights=float16",
        f"optimizer.moments=[{FP8}, {HALF}]",
        "optimizer.rounding=stochastic",
    ),
    "4 bytes": (
        "optimizer.weights=float16",
        f"optimizer.moments=[{FP8}, {FP8}]",
        "optimizer.rounding=stochastic",
    ),
}
MOST_BYTES = {"6 bytes": 6.0, "6 bytes stochastic": 6.0, "4 bytes": 4.0}
MOST_DIFFERENCE = {"6 bytes": 0.002, "6 bytes stochastic": 0.002, "4 bytes": 0.005}
MOST_TIME = 1.2
DIGITS = 3  # of bytes per parameter: scales, one per array, are less


def main(
    overrides: Overrides = None,
    config: ConfigPath = str(PARITY),
    large: Annotated[str, typer.Option(help="the model whose bytes and steps are measured")] = str(
        CONFIGS / "gpt2-small.yaml"
    ),
    data: DataPath = None,
    rounds: Annotated[int, typer.Option(min=4, help="timed steps of each optimizer")] = 20,
    loss: Annotated[bool, typer.Option(help="also train for the validation loss")] = True,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints bytes per parameter, step time over optax, and validation loss by format."""
    shape = GPT2 if large == str(CONFIGS / "gpt2-small.yaml") else ()
    model = load_config(large, list(shape))
    tables = [count_bytes(large, shape), step_times(model, rounds)]
    notes = [
        f"Bytes are counted from the arrays of {Path(large).name}; state is all of the optimizer's,"
        " scales and counters included. Without gradients.",
        f"A step is the update of all parameters and its application, float32 gradients, {rounds} "
        "rounds in turns. Donated: parameters and state are updated in place. Ratios are medians "
        "over rounds.",
    ]
    if loss:
        words = [*(overrides or ()), *([] if data is None else [f"data.path={data}"])]
        console = Console()
        # The float32 run is that of `bench parity`.
        wanted = {
            name: variant(config, words, name.replace(" ", "-"), *settings)
            for name, settings in FORMATS.items()
        }
        corpus = load_corpus(wanted["float32"].data)
        runs = {name: trained(one, corpus, fresh, console) for name, one in wanted.items()}
        tables.append(compare({name: run.loss for name, run in runs.items()}))
        steps = wanted["float32"].train.steps
        notes.append(f"Loss of {steps} steps of {Path(config).name}, over all validation text.")
    publish("optim", tables, json, notes)


def count_bytes(path: str, shape: Iterable[str] = ()) -> Table:
    """Bytes of weights and state per parameter, from live arrays."""
    rows = []
    for name, words in FORMATS.items():
        _, _, state = init_state(load_config(path, [*shape, *words]))
        count = sum(x.size for x in jax.tree.leaves(state.params, is_leaf=is_scaled))
        weights, moments = (_bytes(tree) / count for tree in (state.params, state.opt_state))
        row: dict[str, Any] = {
            "formats": name,
            "parameters": count,
            "weights": weights,
            "state": moments,
            "together": weights + moments,
        }
        if name in MOST_BYTES:
            row["asked"] = f"<= {MOST_BYTES[name]:g}"
            row["within"] = within(round(weights + moments, DIGITS), (None, MOST_BYTES[name]))
        rows.append(row)
        del state
    columns = {
        "formats": "",
        "parameters": ",d",
        "weights": f".{DIGITS}f",
        "state": f".{DIGITS}f",
        "together": f".{DIGITS}f",
        "asked": "",
        "within": "",
    }
    return Table("Bytes per parameter", columns, rows)


def _bytes(tree: Any) -> int:
    leaves = jax.tree.leaves(tree)
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    plain = [jax.random.key_data(x) if k else x for x, k in zip(leaves, keys, strict=True)]
    return sum(x.nbytes for x in plain)


def step_times(config: GPTConfig, rounds: int) -> Table:
    """Optimizer steps of the 6-byte formats over those of plain optax, in turns."""
    params = nnx.as_pure(nnx.state(build(config), nnx.Param))
    grads = jax.tree.map(lambda x: 1e-3 * jnp.cos(x), params)
    plain = optax.adamw(1e-3)
    ours = scaled(plain)

    def update(params, state, grads):
        updates, state = plain.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    rows, columns = [], {"buffers": ""}
    for donated in (False, True):
        scaled_params = ours.scale_params(params)
        first = _stepper(ours.step, scaled_params, ours.init(scaled_params), grads, donated)
        second = _stepper(update, params, plain.init(params), grads, donated)
        times = interleaved(first, second, rounds)
        row, shown = compared("scaled", "optax", times, MOST_TIME)
        rows.append({"buffers": "donated" if donated else "new", **row})
        columns |= shown
        del first, second
    return Table("Time of an AdamW step, 6-byte formats over float32 optax", columns, rows)


def _stepper(
    step: Callable[..., tuple[Any, Any]], params: Any, state: Any, grads: Any, donated: bool
) -> Callable[[], object]:
    """A function that takes one step further and waits for it."""
    compiled = jax.jit(step, donate_argnums=(0, 1) if donated else ())
    # A copy: what is donated is gone, and both rows begin with the same parameters.
    carry = jax.tree.map(jnp.copy, (params, state))

    def advance() -> object:
        nonlocal carry
        carry = jax.block_until_ready(compiled(*carry, grads))
        return carry

    return advance


def compare(losses: dict[str, float]) -> Table:
    """Validation losses beside that of float32."""
    rows = []
    for name, loss in losses.items():
        row: dict[str, Any] = {"formats": name, "validation loss": loss}
        if name in MOST_DIFFERENCE:
            worse, most = loss / losses["float32"] - 1, MOST_DIFFERENCE[name]
            row |= {
                "over float32": worse,
                "asked": f"at most {most:.1%} worse",
                "within": within(worse, (None, most)),
            }
        rows.append(row)
    columns = {
        "formats": "",
        "validation loss": ".5f",
        "over float32": "+.3%",
        "asked": "",
        "within": "",
    }
    return Table("Validation loss in nats per byte", columns, rows)

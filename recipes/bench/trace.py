"""What seeing every scale costs: `unitscale.analysis.trace_scales` of a training step.

    python -m recipes bench trace

The step is that of a GPT of GPT-2 small's depth, narrower and on fewer tokens, with its backward
pass and optimizer. The program that measures each of its values runs in turns with the plain one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer

from unitscale.analysis import trace_scales

from ..gpt.config import GPTConfig
from ..registry import load_config
from ..run.state import init_state
from ..train import make_train_step
from ._runs import Overrides
from ._steps import random_batch
from ._table import JsonPath, Table, publish, within
from ._timing import compared, interleaved

GPT2_SMALL = Path(__file__).parents[2] / "configs" / "gpt" / "gpt2-small.yaml"
# Its depth and heads of 64 features; a third of its width, and fewer tokens.
SHAPE = ("policy=float32", "model.width=256", "model.heads=4", "data.sequence_length=128")
SHAPE += ("data.batch_size=8",)
MOST_TIME, MOST_MEMORY = 3.0, 1.5


def main(
    overrides: Overrides = None,
    config: Annotated[str, typer.Option("--config", help="the run whose step is traced")] = str(
        GPT2_SMALL
    ),
    rounds: Annotated[int, typer.Option(min=4, help="timed steps of each program")] = 20,
    json: JsonPath = None,
) -> None:
    """Prints time, memory and time to compile of a traced step over those of the plain one."""
    shape = SHAPE if config == str(GPT2_SMALL) else ()
    traced = load_config(config, [*shape, *(overrides or ())])
    model, data = traced.model, traced.data
    columns, rows = costs(traced, rounds)
    title = (
        f"A training step under trace_scales: {model.layers} layers, {model.width} wide, "
        f"{data.batch_size} x {data.sequence_length} tokens, {traced.policy}"
    )
    notes = [
        f"time: each program {rounds} times, in turns; ratio is the median over rounds. memory: "
        "arguments, temporaries and results, by XLA. Both run without donated arguments.",
    ]
    publish("trace", [Table(title, columns, rows)], json, notes)


def costs(config: GPTConfig, rounds: int) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Columns, and a row each for time, memory and time to compile."""
    graphdef, optimizer, state = init_state(config)
    step = make_train_step(graphdef, optimizer, config.scalify)
    arguments = state, random_batch(config), np.int32(0)

    def plain(*args: Any) -> Any:  # a step of its own would take the memory of its arguments
        return step(*args)

    traced, traced_seconds = _compiled(lambda: trace_scales(plain).lower(*arguments))
    bare, bare_seconds = _compiled(lambda: jax.jit(plain).lower(*arguments))
    times = interleaved(_caller(traced, arguments), _caller(bare, arguments), rounds)
    row, shown = compared("traced", "plain", times, MOST_TIME)
    sizes = _bytes(traced), _bytes(bare)
    memory = sizes[0] / sizes[1]
    rows = [
        {"what": "time ms", "traced": row.pop("traced ms"), "plain": row.pop("plain ms"), **row},
        {
            "what": "memory MiB",
            "traced": sizes[0] / 2**20,
            "plain": sizes[1] / 2**20,
            "ratio": memory,
            "asked": f"ratio <= {MOST_MEMORY}",
            "within": within(memory, (None, MOST_MEMORY)),
        },
        {
            "what": "compile s",
            "traced": traced_seconds,
            "plain": bare_seconds,
            "ratio": traced_seconds / bare_seconds,
        },
    ]
    columns = {"what": "", "traced": ".1f", "plain": ".1f"}
    return columns | {name: shown[name] for name in row}, rows


def _compiled(lower: Callable[[], Any]) -> tuple[Any, float]:
    """A program, and the seconds it took to trace, lower and compile."""
    jax.clear_caches()
    start = time.perf_counter()
    program = lower().compile()
    return program, time.perf_counter() - start


def _caller(program: Any, arguments: tuple[Any, ...]) -> Callable[[], object]:
    return lambda: jax.block_until_ready(program(*arguments))


def _bytes(program: Any) -> int:
    memory = program.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes

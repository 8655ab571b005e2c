"""What seeing every scale costs: `unitscale.analysis.trace_scales` of a training step.

    python -m recipes bench trace

The step is that of a GPT of GPT-2 small's depth, narrower and on fewer tokens, with its backward
pass and optimizer. A call that measures each of its values runs in turns with the compiled step.
"""

import threading
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import numpy as np
import typer

from unitscale.analysis import trace_scales

from ..gpt.config import GPTConfig
from ..registry import CONFIGS, load_kind
from ._runs import Overrides
from ._table import JsonPath, Table, asked, publish
from ._timing import compared, compiled, interleaved, random_batch, seconds, train_step

GPT2_SMALL = CONFIGS / "gpt" / "gpt2-small.yaml"
# Its depth and heads of 64 features; a third of its width, and fewer tokens.
SHAPE = ("policy=float32", "model.width=256", "model.heads=4", "data.sequence_length=128")
SHAPE += ("data.batch_size=8",)
MOST_TIME, MOST_MEMORY, MOST_COMPILING = 3.0, 1.5, 3.0


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
    traced = load_kind(GPTConfig, config, [*shape, *(overrides or ())])
    model, data = traced.model, traced.data
    title = (
        f"A training step under trace_scales: {model.layers} layers, {model.width} wide, "
        f"{data.batch_size} x {data.sequence_length} tokens, {traced.policy}"
    )
    notes = [
        f"time: each {rounds} times, in turns; ratio is the median over rounds. memory: of the "
        "plain step by XLA, without donated arguments; of the traced one the largest sum over its "
        "arrays, looked at every millisecond, and arguments. compile: tracing too; of the traced "
        "one the first call less the time of a later one.",
    ]
    publish("trace", [Table(title, costs(traced, rounds))], json, notes)


def costs(config: GPTConfig, rounds: int) -> list[dict[str, Any]]:
    """A row each for time, memory and time to compile."""
    step, state = train_step(config)
    arguments = state, random_batch(config), np.int32(0)

    def plain(*args: Any) -> Any:  # a step of its own would take the memory of its arguments
        return step(*args)

    bare, bare_seconds = compiled(lambda: jax.jit(plain).lower(*arguments))
    jax.clear_caches()
    tracer = trace_scales(plain)
    first = seconds(lambda: tracer(*arguments))
    callers = (
        lambda: jax.block_until_ready(tracer(*arguments).result),
        lambda: jax.block_until_ready(bare(*arguments)),
    )
    row = compared("traced", "plain", interleaved(*callers, rounds), MOST_TIME)
    traced_seconds = first - row["traced ms"] / 1e3
    sizes = _largest(callers[0]), _bytes(bare)
    return [
        {"what": "time ms", "traced": row.pop("traced ms"), "plain": row.pop("plain ms"), **row},
        _row("memory MiB", *(size / 2**20 for size in sizes), most=MOST_MEMORY),
        _row("compile s", traced_seconds, bare_seconds, most=MOST_COMPILING),
    ]


def _row(what: str, traced: float, plain: float, most: float) -> dict[str, Any]:
    ratio = traced / plain
    return {
        "what": what,
        "traced": traced,
        "plain": plain,
        "ratio": ratio,
        **asked(ratio, most=most),
    }


def _largest(call: Callable[[], object]) -> int:
    """The largest sum over all arrays while a function runs; the arguments are among them."""
    running, sizes = threading.Event(), [0]
    running.set()

    def look() -> None:
        while running.is_set():
            sizes.append(sum(x.nbytes for x in jax.live_arrays()))
            time.sleep(1e-3)

    watch = threading.Thread(target=look)
    watch.start()
    try:
        call()
    finally:
        running.clear()
        watch.join()
    return max(sizes)


def _bytes(program: Any) -> int:
    memory = program.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes

"""What seeing every scale costs: `unitscale.analysis.trace_scales` of a training step.

    python -m recipes bench trace

The step is that of a GPT of GPT-2 small's depth, narrower and on fewer tokens, with its backward
pass and optimizer. The program that measures each of its values runs in turns with the plain one.
"""

from typing import Annotated, Any

import jax
import numpy as np
import typer

from unitscale.analysis import trace_scales

from ..gpt.config import GPTConfig
from ..registry import CONFIGS, load_kind
from ._runs import Overrides
from ._table import JsonPath, Table, asked, publish
from ._timing import compared, compiled, interleaved, random_batch, train_step

GPT2_SMALL = CONFIGS / "gpt" / "gpt2-small.yaml"
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
    traced = load_kind(GPTConfig, config, [*shape, *(overrides or ())])
    model, data = traced.model, traced.data
    title = (
        f"A training step under trace_scales: {model.layers} layers, {model.width} wide, "
        f"{data.batch_size} x {data.sequence_length} tokens, {traced.policy}"
    )
    notes = [
        f"time: each program {rounds} times, in turns; ratio is the median over rounds. memory: "
        "arguments, temporaries and results, by XLA. Both run without donated arguments.",
    ]
    publish("trace", [Table(title, costs(traced, rounds))], json, notes)


def costs(config: GPTConfig, rounds: int) -> list[dict[str, Any]]:
    """A row each for time, memory and time to compile."""
    step, state = train_step(config)
    arguments = state, random_batch(config), np.int32(0)

    def plain(*args: Any) -> Any:  # a step of its own would take the memory of its arguments
        return step(*args)

    programs = [trace_scales(plain), jax.jit(plain)]
    found = [compiled(lambda program=program: program.lower(*arguments)) for program in programs]
    (traced, traced_seconds), (bare, bare_seconds) = found
    callers = [
        lambda program=program: jax.block_until_ready(program(*arguments))
        for program in (traced, bare)
    ]
    row = compared("traced", "plain", interleaved(callers[0], callers[1], rounds), MOST_TIME)
    sizes = _bytes(traced), _bytes(bare)
    memory = sizes[0] / sizes[1]
    return [
        {"what": "time ms", "traced": row.pop("traced ms"), "plain": row.pop("plain ms"), **row},
        {
            "what": "memory MiB",
            "traced": sizes[0] / 2**20,
            "plain": sizes[1] / 2**20,
            "ratio": memory,
            **asked(memory, most=MOST_MEMORY),
        },
        {
            "what": "compile s",
            "traced": traced_seconds,
            "plain": bare_seconds,
            "ratio": traced_seconds / bare_seconds,
        },
    ]


def _bytes(program: Any) -> int:
    memory = program.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes

"""What attention in chunks saves in a training step over a long context: memory and time."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

from ..gpt.config import GPTConfig
from ._table import asked
from ._timing import advancing, interleaved, random_batch, train_step

LONG = ("policy=float32", "data.sequence_length=4096", "data.batch_size=1")
MOST_MEMORY, MOST_TIME = 0.3, 1.3


def long_context(config: GPTConfig, rounds: int) -> list[dict[str, Any]]:
    """Two rows, temporaries and time of a config's step: attention in chunks, and plain."""
    batch = random_batch(config)
    names = ("chunked", "plain")
    (chunked, chunked_bytes), (plain, plain_bytes) = (_step(config, name, batch) for name in names)
    times = interleaved(chunked, plain, rounds, warmup=1)
    shape, data = config.model, config.data
    return [
        {
            "model": f"{shape.width} wide, {shape.layers} layers, {data.batch_size} x "
            f"{data.sequence_length} tokens",
            "of a step": what,
            **{name: f"{value:,.0f}" for name, value in zip(names, values, strict=True)},
            "ratio": values[0] / values[1],
            **asked(values[0] / values[1], most=most),
        }
        for what, values, most in (
            ("temporaries, MiB", (chunked_bytes / 2**20, plain_bytes / 2**20), MOST_MEMORY),
            ("median time, ms", [1e3 * statistics.median(t.elapsed) for t in times], MOST_TIME),
        )
    ]


def _step(config: GPTConfig, implementation: str, batch: Any) -> tuple[Callable[[], object], int]:
    """A function that trains one step further, and the bytes of temporaries that it takes."""
    shape = config.model.model_copy(update={"attention_implementation": implementation})
    step, state = train_step(config.model_copy(update={"model": shape}))
    program = step.lower(state, batch, np.int32(0)).compile()
    return advancing(program, state, batch), program.memory_analysis().temp_size_in_bytes

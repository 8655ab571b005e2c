"""Time, memory and kernels of a training step on this machine's CPU or GPU.

    python -m recipes bench step
    JAX_PLATFORMS=cuda python -m recipes bench step --on gpu --shapes gpt2-small,llama-1b

A row is a library, a policy and the formats of the optimizer state (`ROWS`); a shape is a config
and its batch (`SHAPES`). The step is that of `recipes.train`, on random tokens. Every row runs in a
process of its own, so that its peak of memory is its own. On a GPU each time stands beside the one
that `recipes.bench.aot` projects of the same program. `bench h200` compiles the same steps for an
H200, without one.
"""

import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any
from unittest import mock

import jax
import numpy as np
import typer

from ..config import RunConfig
from ..errors import RecipeError
from ..gpt.config import GPTConfig
from ..registry import CONFIGS, load_kind
from ..run.pool import message_of
from ..run.state import init_state
from ..run.step import abstract_step, make_train_step
from . import runs
from .aot import roofline

_STATE = ("precision.weights=null", "precision.moments=null", "precision.rounding=nearest")
_SCALED = ("precision.weights=float16", "precision.moments=[float8_e4m3fn,float16]")
_SCALED += ("precision.rounding=nearest", "precision.min_size=4096")  # defaults of optim.scaled
_PLAIN = ("model.library=plain", "optimizer.umup=false", "optimizer.learning_rate=0.001", *_STATE)
_PADDED = ("model.vocab_multiple=128",)  # a size that kernels like; plain models have no such key
REFERENCE = "plain-bfloat16"
ROWS = {
    REFERENCE: ("precision.policy=bfloat16", *_PLAIN),
    "fp8": ("precision.policy=fp8", *_PADDED, *_STATE),
    "fp8-scaled": ("precision.policy=fp8", *_PADDED, *_SCALED),
    "converted": ("precision.policy=bfloat16", *_PLAIN, "precision.matmuls=fp8_dynamic"),
    "scalify-bfloat16": ("precision=scalify_bfloat16", *_PLAIN),
    "scalify-float16": ("precision=scalify_float16", *_PLAIN),
}
"""Overrides of the rows that are looked at by default."""
MORE = {
    "bfloat16": ("precision.policy=bfloat16", *_PADDED, *_STATE),
    "qwix": ("precision.policy=bfloat16", *_PLAIN, "precision.matmuls=qwix"),
    "fp8-readout-scaled": ("precision.readout=gradients", *ROWS["fp8-scaled"]),
}
"""Rows only where they are asked for."""
SHAPES = {
    "parity": (),
    "gpt2-small": ("model.vocab=50257", "model.tied_readout=true", "data.batch_size=8"),
    "llama-1b": ("data.batch_size=4",),
}
"""Overrides of the configs of `configs/gpt/`."""


def main(
    overrides: runs.Overrides = None,
    shapes: Annotated[
        str | None, typer.Option(help=f"of {', '.join(SHAPES)}; by default the first, on a GPU one")
    ] = None,
    rows: Annotated[
        str, typer.Option(help=f"programs, separated by commas; also {', '.join(MORE)}")
    ] = f"{REFERENCE},fp8,fp8-scaled",
    on: Annotated[str, typer.Option(help="cpu or gpu")] = "cpu",
    rounds: Annotated[int, typer.Option(min=2, help="timed rounds of five steps")] = 5,
    json: runs.JsonPath = None,
) -> None:
    """Prints step time, tokens per second, memory, kernels and loss of training steps."""
    if on not in ("cpu", "gpu"):
        raise RecipeError(f"--on: expected cpu or gpu; got {on}; correct it")
    os.environ["JAX_PLATFORMS"] = platform = "cuda" if on == "gpu" else "cpu"
    names = runs.chosen("--rows", rows, ROWS | MORE)
    wanted = runs.chosen("--shapes", shapes or ("gpt2-small" if on == "gpu" else "parity"), SHAPES)
    tables = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        for shape in wanted:
            work = functools.partial(_measure_or_say, shape, overrides or [], rounds)
            found: list[dict[str, Any]] = []
            for row in pool.map(work, names):
                if found and "ms" in found[0] and "ms" in row:
                    row["over first"] = row["ms"] / found[0]["ms"]
                found.append(row)
            tables.append(runs.Table(f"Training step of {shape} on this {on.upper()}", found))
    measured = [row for table in tables for row in table.rows]
    failed = [f"{row['program']}: {row['error']}" for row in measured if "error" in row]
    if len(failed) == len(measured):
        todo = "install JAX for this machine's GPU" if on == "gpu" else "see --rows"
        raise RecipeError(f"bench step: no row could be measured ({failed[0]}); {todo}")
    jax.config.update("jax_platforms", platform)
    notes = [f"ms: median of {rounds} rounds of five steps, of which the last is waited for."]
    runs.publish("step", tables, json, notes)
    if failed:
        raise RecipeError(f"bench step: failed: {'; '.join(failed)}", exit_code=1)


def config_of(shape: str, row: str, overrides: Sequence[str] = ()) -> GPTConfig:
    """The run whose step is looked at."""
    words = [*SHAPES[shape], *(ROWS | MORE)[row], *overrides]
    return load_kind(GPTConfig, CONFIGS / "gpt" / f"{shape}.yaml", words)


def _measure_or_say(shape: str, overrides: list[str], rounds: int, row: str) -> dict[str, Any]:
    try:
        return {"program": row, **measure(config_of(shape, row, overrides), rounds)}
    except Exception as error:  # the other rows go on
        return {"program": row, "error": message_of(error)}


def measure(config: GPTConfig, rounds: int) -> dict[str, Any]:
    """Compile and run the step of a config in this process."""
    gpu = jax.default_backend() == "gpu"
    step, state = train_step(config)
    batches = [random_batch(config, seed) for seed in range(4)]
    start = time.process_time()
    with fused_attention() if gpu else nullcontext():
        compiled = step.lower(state, batches[0], np.int32(0)).compile()
    compiling, count, values, times = time.process_time() - start, 0, {}, []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(5):
            state, values = compiled(state, batches[count % len(batches)], np.int32(count))
            count += 1
        jax.block_until_ready(values)
        times.append((time.perf_counter() - start) / 5)
    seconds = statistics.median(times[1:])
    report = roofline(compiled)
    row = {"ms": 1e3 * seconds, "tokens/s": config.data.step_size / seconds}
    row |= {"peak MiB": peak_bytes(compiled) / 2**20, "loss": float(values["loss"])}
    row |= {"compile s": compiling, "kernels": len(report.kernels)}
    if gpu:
        peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
        row |= {"peak MiB": peak / 2**20, "projected ms": 1e3 * report.seconds}
    return row


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Arguments, results and temporaries of a program; what is donated counts once."""
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return held + memory.temp_size_in_bytes - memory.alias_size_in_bytes


@contextmanager
def fused_attention() -> Iterator[None]:
    """Within the block, attention of `jax.nn` is traced for cuDNN's kernel.

    Plain models do not ask for it. The type of the query decides nothing: a program that is
    scalified is traced in float32, and `scalify` gives the kernel 16 bits.
    """
    own = jax.nn.dot_product_attention

    @functools.wraps(own)
    def attend(*args: Any, implementation: Any = None, **options: Any) -> Any:
        return own(*args, implementation=implementation or "cudnn", **options)

    with mock.patch.object(jax.nn, "dot_product_attention", attend):
        yield


def random_batch(config: GPTConfig, seed: int = 0) -> np.ndarray:
    """Windows of random tokens."""
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    return np.random.default_rng(seed).integers(0, config.model.vocab, shape).astype(np.int32)


def train_step(config: RunConfig) -> tuple[Any, Any]:
    """The step of `recipes.train`, and the state before the first one."""
    graphdef, optimizer, state = init_state(config)
    return make_train_step(graphdef, optimizer, config.precision, settings=config.optimizer), state


def compile_times(config: RunConfig) -> tuple[float, float, jax.stages.Compiled]:
    """CPU seconds to trace a config's step, and to trace and compile it, cold; and the program."""
    jax.clear_caches()
    start = time.process_time()
    _, step, arguments = abstract_step(config)
    lowered = step.lower(*arguments)
    traced = time.process_time()
    compiled = lowered.compile()
    return traced - start, time.process_time() - start, compiled


def stepper(config: GPTConfig) -> Callable[[], object]:
    """A function that trains one step further on the same random batch, and waits for it."""
    step, state = train_step(config)
    batch = random_batch(config)
    return advancing(lambda state, index: step(state, batch, index), state)


def advancing(step: Callable[[Any, Any], tuple[Any, Any]], state: Any) -> Callable[[], object]:
    """A function that takes one step further, `(state, index) -> (state, values)`, and waits."""
    done = 0

    def advance() -> object:
        nonlocal state, done
        state, values = step(state, np.int32(done))
        done += 1
        return jax.block_until_ready((state, values))

    return advance


def time_ratio(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> dict[str, float]:
    """Columns that compare two functions that wait for their own results.

    They take turns, each round in the other order, so that whatever slows the machine slows both.
    A ratio is the median over rounds of that of a round.
    """
    times: tuple[list[Any], list[Any]] = [], []
    for index in range(rounds + 2):  # two rounds to warm up
        for which in (0, 1) if index % 2 else (1, 0):
            start = time.perf_counter(), time.process_time()
            (first, second)[which]()
            times[which].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    pairs = [(a[0] / b[0], a[1] / b[1]) for a, b in zip(*times, strict=True)][2:]
    elapsed, cpu = zip(*pairs, strict=True)
    low, middle, high = statistics.quantiles(elapsed, n=4)
    ms = [1e3 * statistics.median(t for t, _ in found[2:]) for found in times]
    row = {"ms": ms[0], "reference ms": ms[1], "ratio": middle}
    return row | {"lower quartile": low, "upper quartile": high, "CPU time": statistics.median(cpu)}

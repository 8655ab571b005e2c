"""Measure time, memory and kernels of training steps, on this machine or projected for an H200.

    python -m recipes bench step
    JAX_PLATFORMS=cuda python -m recipes bench step --on gpu --shapes gpt2-small,llama-1b
    JAX_PLATFORMS=cpu python -m recipes bench step --on h200 --dump programs
    JAX_PLATFORMS=cpu python -m recipes bench step --compile

A row is a library, a policy, and formats of the optimizer state; a shape is a config with a batch
size. The step is that of `recipes.train`, on random tokens. `--on h200` (`bench h200`) needs JAX's
CUDA plugin but no GPU: it projects the time of each kernel (see `recipes.bench.aot`).
"""

import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from rich.console import Console

from unitscale.quant import check_fp8

from ..config import RunConfig
from ..errors import RecipeError
from ..gpt.config import GPTConfig
from ..registry import CONFIGS, load_kind
from ..run.pool import message_of
from ..run.state import init_state
from ..run.step import abstract_step, make_train_step
from . import runs
from .aot import ARITHMETIC, ATTENTION, MEMORY, Roofline, compile_h200, h200_topology, roofline

_STATE = ("precision.weights=null", "precision.moments=null", "precision.rounding=nearest")
_SCALED = ("precision.weights=float16", "precision.moments=[float8_e4m3fn,float16]")
_SCALED += ("precision.rounding=nearest", "precision.min_size=4096")  # defaults of optim.scaled
_PLAIN = ("model.library=plain", "optimizer.umup=false", "optimizer.learning_rate=0.001", *_STATE)
_PADDED = ("model.vocab_multiple=128",)  # suits GPU kernels; not supported by plain models
REFERENCE = "plain-bfloat16"
# Overrides by row; those of MORE are measured only on request.
ROWS = {
    REFERENCE: ("precision.policy=bfloat16", *_PLAIN),
    "fp8": ("precision.policy=fp8", *_PADDED, *_STATE),
    "fp8-scaled": ("precision.policy=fp8", *_PADDED, *_SCALED),
    "converted": ("precision.policy=bfloat16", *_PLAIN, "precision.matmuls=fp8_dynamic"),
    "scalify-bfloat16": ("precision=scalify_bfloat16", *_PLAIN),
    "scalify-float16": ("precision=scalify_float16", *_PLAIN),
}
MORE = {
    "plain-float32": ("precision.policy=float32", *_PLAIN),
    "float32": ("precision.policy=float32", *_STATE),
    "bfloat16": ("precision.policy=bfloat16", *_PADDED, *_STATE),
    "qwix": ("precision.policy=bfloat16", *_PLAIN, "precision.matmuls=qwix"),
    "fp8-readout-scaled": ("precision.readout=gradients", *ROWS["fp8-scaled"]),
}
PLAIN, MOST_COMPILING = "plain-float32", 1.8
COMPILED = (("fp8", 12), ("fp8-scaled", 4))
# Overrides by config in `configs/gpt/`.
SHAPES = {
    "parity": (),
    "gpt2-small": ("model.vocab=50257", "model.tied_readout=true", "data.batch_size=8"),
    "llama-1b": ("data.batch_size=4",),
}
DEFAULT_SHAPES = {"cpu": "parity", "gpu": "gpt2-small", "h200": "gpt2-small,llama-1b"}
KINDS = ("FP8 products", "16-bit products", "32-bit products", ATTENTION, MEMORY, ARITHMETIC)
PROJECTED = (
    "All times are projected (recipes.bench.aot). All attention is cuDNN's kernel.",
    "over plain: projected time relative to plain flax.nnx in bfloat16. peak MiB: arguments, "
    "results and temporaries. FP8 matmuls: how many run as FP8 kernels, attention's not counted.",
)


def main(
    overrides: runs.Overrides = None,
    shapes: Annotated[str | None, typer.Option(help=f"list of {', '.join(SHAPES)}")] = None,
    rows: Annotated[str | None, typer.Option(help=f"list of {', '.join(ROWS | MORE)}")] = None,
    on: Annotated[str, typer.Option(help="cpu, gpu or h200")] = "cpu",
    rounds: Annotated[int, typer.Option(min=2, help="timed rounds of five steps")] = 5,
    dump: Annotated[Path | None, typer.Option(help="folder for programs (h200)")] = None,
    top: Annotated[int, typer.Option(min=0, help="element-wise kernels to list (h200)")] = 0,
    compiling: Annotated[bool, typer.Option("--compile", help="measure compilation alone")] = False,
    json: runs.JsonPath = None,
) -> None:
    """Print step time, memory and kernels of training steps."""
    if on not in DEFAULT_SHAPES:
        raise RecipeError(f"--on: expected cpu, gpu or h200; got {on}")
    wanted = runs.chosen("--shapes", shapes or DEFAULT_SHAPES[on], SHAPES)
    if compiling:
        tables = [compile_times(shape, overrides or []) for shape in wanted]
        return runs.publish("compile", tables, json)
    default = ",".join(ROWS) if on == "h200" else f"{REFERENCE},fp8,fp8-scaled"
    names = runs.chosen("--rows", rows or default, ROWS | MORE)
    if on == "h200":
        tables = project(wanted, names, overrides or [], dump, top)
        return runs.publish("h200", tables, json, PROJECTED)
    os.environ["JAX_PLATFORMS"] = platform = "cuda" if on == "gpu" else "cpu"
    tables = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        for shape in wanted:
            work = functools.partial(_measure, shape, overrides or [], rounds)
            found: list[dict[str, Any]] = []
            for row in pool.map(work, names):
                if found and "ms" in found[0] and "ms" in row:
                    row["over first"] = row["ms"] / found[0]["ms"]
                found.append(row)
            tables.append(runs.Table(f"Training step of {shape} on this {on.upper()}", found))
    measured = [row for table in tables for row in table.rows]
    failed = [f"{row['program']}: {row['error']}" for row in measured if "error" in row]
    jax.config.update("jax_platforms", platform)
    notes = [f"ms: median of {rounds} rounds of five steps, waiting for the last one only."]
    if some := len(failed) < len(measured):
        runs.publish("step", tables, json, notes)
    if failed:
        raise RecipeError(f"bench step: failed: {'; '.join(failed)}", exit_code=1 if some else 2)


def config_of(shape: str, row: str, overrides: Sequence[str] = ()) -> GPTConfig:
    words = [*SHAPES[shape], *(ROWS | MORE)[row], *overrides]
    return load_kind(GPTConfig, CONFIGS / "gpt" / f"{shape}.yaml", words)


def _measure(shape: str, overrides: list[str], rounds: int, row: str) -> dict[str, Any]:
    try:
        return {"program": row, **measure(config_of(shape, row, overrides), rounds)}
    except Exception as error:  # other rows continue
        return {"program": row, "error": message_of(error)}


def measure(config: GPTConfig, rounds: int) -> dict[str, Any]:
    gpu = jax.default_backend() == "gpu"
    graphdef, optimizer, state = init_state(config)
    step = make_train_step(graphdef, optimizer, config)
    batches = [random_batch(config, seed) for seed in range(4)]
    start = time.process_time()
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
    """Return the bytes of arguments, results and temporaries; donated arrays count once."""
    memory: Any = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return held + memory.temp_size_in_bytes - memory.alias_size_in_bytes


def project(
    shapes: list[str], names: list[str], overrides: list[str], dump: Path | None, top: int
) -> list[runs.Table]:
    """Compile the programs (rows) of each model (shape) for an H200, and project their time."""
    jax.config.update("jax_platforms", "cpu")  # otherwise the plugin looks for a driver
    try:
        h200_topology()
    except ImportError as error:
        raise RecipeError(str(error)) from error
    tables = []
    for shape in shapes:
        found: list[dict[str, Any]] = []
        report = Roofline(())
        for name in names:
            Console(stderr=True).print(f"compiling {shape}: {name}", markup=False, highlight=False)
            _, step, arguments = abstract_step(config_of(shape, name, overrides))
            compiled = compile_h200(step, *arguments)
            if dump is not None:
                dump.mkdir(parents=True, exist_ok=True)
                (dump / f"{shape}-{name}.hlo").write_text(compiled.as_text() or "", "utf-8")
            report = roofline(compiled)
            found.append({"program": name, **described(compiled, report)})
            jax.clear_caches()
        plain = [row["projected ms"] for row in found if row["program"] == REFERENCE]
        for row in found if plain else ():
            row["over plain"] = row["projected ms"] / plain[0]
        data = config_of(shape, names[0], overrides).data
        tokens = f"{data.batch_size} x {data.sequence_length:,} tokens"
        title = f"Training step of {shape} on an H200, projected, {tokens}"
        tables.append(runs.Table(title, found))
        if top:
            rows = [
                {"projected ms": 1e3 * t.seconds, "MiB": t.bytes / 2**20, "kernels": t.kernels}
                | {"from": t.label.replace(f"{CONFIGS.parent}/", "")}
                for t in report.by_place()[:top]
            ]
            tables.append(runs.Table(f"Element-wise kernels of {names[-1]}", rows))
    return tables


def described(compiled: jax.stages.Compiled, report: Roofline) -> dict[str, Any]:
    fp8, memory = check_fp8(compiled), compiled.memory_analysis()
    ms = {total.label: 1e3 * total.seconds for total in report.by_kind()}
    row: dict[str, Any] = {"projected ms": 1e3 * report.seconds, "over plain": None}
    row |= {"peak MiB": peak_bytes(compiled) / 2**20}
    row |= {"temporaries MiB": getattr(memory, "temp_size_in_bytes", 0) / 2**20}
    row |= {"uncounted loops": report.uncounted} if report.uncounted else {}
    row |= {"kernels": len(report.kernels), "FP8 matmuls": f"{len(fp8.fp8)} of {len(fp8.matmuls)}"}
    row |= {"amax": fp8.amax_reductions}
    return row | {f"{kind} ms": ms.get(kind, 0.0) for kind in KINDS}


def random_batch(config: GPTConfig, seed: int = 0) -> np.ndarray:
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    return np.random.default_rng(seed).integers(0, config.model.vocab, shape).astype(np.int32)


def compile_seconds(config: RunConfig) -> float:
    """Measure the CPU seconds to trace and compile a config's step, without caches."""
    jax.clear_caches()
    start = time.process_time()
    _, step, arguments = abstract_step(config)
    step.lower(*arguments).compile()
    return time.process_time() - start


def compile_times(shape: str, overrides: Sequence[str]) -> runs.Table:
    """Compare the CPU seconds to trace and compile steps with those of plain float32 models."""
    rows = []
    for program, layers in COMPILED:
        words = [*overrides, f"model.layers={layers}"]
        own, plain = (compile_seconds(config_of(shape, r, words)) for r in (program, PLAIN))
        row = {"program": program, "layers": layers, "s": own, "plain s": plain}
        rows.append(row | {"ratio": own / plain} | runs.asked(own / plain, MOST_COMPILING))
    return runs.Table(f"Trace and compile a step of {shape}, over plain flax.nnx", rows)


def stepper(config: GPTConfig) -> Callable[[], object]:
    """Return a function that runs one training step on a random batch, to its end."""
    graphdef, optimizer, state = init_state(config)
    step, batch = make_train_step(graphdef, optimizer, config), random_batch(config)
    return advancing(lambda state, index: step(state, batch, index), state)


def advancing(step: Callable[[Any, Any], tuple[Any, Any]], state: Any) -> Callable[[], object]:
    """Return a function that calls `step(state, index) -> (state, values)`, and waits for it."""
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
    """Time two functions that take turns; return columns with medians over rounds."""
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

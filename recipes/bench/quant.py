"""What each way of choosing FP8 scales costs: loss, kernels, statistics, memory and speed.

    python -m recipes bench quant --data TEXT

Trains `configs/gpt/parity.yaml` once for each policy (as `bench parity`, whose float32 and fp8 runs
are used again), and its plain model converted and through qwix; compiles the training step of
`configs/gpt/gpt2-small.yaml` for an H200 where the CUDA plugin is installed, which needs no GPU,
and times a larger model where there is one. Losses alone, of the readout in FP8 too:

    python -m recipes bench quant --policies fp8,fp8-readout --no-convert --no-compile --seeds 5
"""

import importlib.util
import re
import statistics
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from flax import nnx
from rich.console import Console

from unitscale import nn
from unitscale.quant import Fp8Report, Matmul, check_fp8

from ..gpt.config import GPTConfig
from ..registry import CONFIGS, load_kind
from ..run.step import abstract_step
from ._compare import compare, comparison, judged
from ._runs import ConfigPath, DataPaths, Fresh, Jobs, Overrides, PlainRate, Seeds, Told
from ._table import JsonPath, Table, asked, publish
from ._timing import random_batch, seconds, stepper
from .aot import compile_h200, h200_available
from .overhead import GPT2

MOST_MEMORY = 0.8
MOST_PADDING = 128  # of a vocabulary
POLICIES = "fp8,fp8_dynamic,fp8_delayed,mxfp8"
MISSING = "not installed: pip install qwix"
# 1.0 billion parameters.
LARGE = (
    "model.width=2048",
    "model.layers=20",
    "model.heads=16",
    "data.sequence_length=2048",
    "data.batch_size=8",
)
GPU_COMMAND = "JAX_PLATFORMS=cuda python -m recipes bench quant --no-train --no-compile"


def main(
    overrides: Overrides = None,
    config: ConfigPath = None,
    data: DataPaths = None,
    policies: Annotated[str, typer.Option(help="policies, separated by commas")] = POLICIES,
    plain_learning_rate: PlainRate = None,
    jobs: Jobs = 1,
    fresh: Fresh = False,
    train: Annotated[bool, typer.Option(help="train each policy, or use its finished run")] = True,
    convert: Annotated[
        bool, typer.Option(help="train the plain model converted, and through qwix")
    ] = True,
    seeds: Seeds = None,
    compile: Annotated[bool, typer.Option(help="compile GPT-2 small for an H200")] = True,
    steps: Annotated[int, typer.Option(min=4, help="timed steps of each policy, on a GPU")] = 20,
    json: JsonPath = None,
) -> None:
    """Prints loss, FP8 kernels, amax reductions, memory and speed by policy."""
    entry = comparison("quant").only("--policies", policies)
    names = [name for name in entry.variants if name in nn.POLICIES and name != entry.reference]
    told = Told(config, overrides, seeds, fresh, data, jobs)
    tables, notes = [], []
    if train:
        tables += compare(entry, told).tables()
        notes.append("No loss scale; loss over all validation text.")
    if train and convert:
        tables += converted(told, plain_learning_rate)
    if not has_qwix():
        notes.append(f"The program through qwix: {MISSING}")
    if compile and h200_available():
        tables += [kernels(names), memory(names)]
        notes.append(
            "Compiled, not run. Dense: all products but attention's own and the readout's. amax: "
            "reductions to the greatest magnitude. Block scales have FP8 kernels from sm_100 on."
        )
    elif compile:
        notes.append(
            "FP8 kernels and memory: not compiled; that needs the CUDA plugin for JAX, see "
            "recipes.bench.aot.compile_h200."
        )
    if jax.default_backend() == "gpu":
        tables.append(speeds(names, steps))
    else:
        notes.append(f"Tokens per second: not measured, no GPU; on one, run {GPU_COMMAND}")
    publish("quant", tables, json, notes)


def has_qwix() -> bool:
    """Whether qwix is installed."""
    return importlib.util.find_spec("qwix") is not None


def converted(told: Told, rate: float | None) -> list[Table]:
    """Losses of the plain model in FP8, and whether ours are no worse than that of qwix."""
    entry = comparison("converted")
    if not has_qwix():
        entry = entry.only("--policies", "converted-fp8_dynamic,converted-fp8_delayed")
    found = compare(entry, told, entry.at_rate(rate))
    tables = found.tables()
    if "qwix" in found.values:
        values = {k: v for k, v in found.values.items() if k != entry.reference}
        rows = judged(values, "qwix", dict.fromkeys(values, "no worse"))
        tables.append(Table("The same, converted over through qwix", rows))
    return tables


def kernels(names: Sequence[str]) -> Table:
    """What an H200 would run for a training step of GPT-2 small."""
    policies = {name: [f"policy={name}"] for name in ("bfloat16", *names)}
    half = ["policy=bfloat16", "model.library=plain", "optimizer.umup=false"]
    plain = {"plain flax.nnx": half}
    plain["plain, converted to fp8_dynamic"] = [*half, "model.products=fp8_dynamic"]
    if has_qwix():
        plain["plain, through qwix"] = [*half, "model.products=qwix"]
    rows = []
    for programs in (policies, plain):
        reference = None
        for name, words in programs.items():
            config = load_kind(GPTConfig, CONFIGS / "gpt" / "gpt2-small.yaml", [*GPT2, *words])
            _say(f"compiling a training step: {name}")
            _, step, shapes = abstract_step(config)
            compiled = compile_h200(step, *shapes)
            analysis: Any = compiled.memory_analysis()
            reference = reference or analysis.temp_size_in_bytes
            sizes = analysis.temp_size_in_bytes, reference
            rows.append(row_of(name, check_fp8(compiled), config.model.vocab, *sizes))
    tokens = f"{config.data.batch_size} x {config.data.sequence_length} tokens"
    return Table(f"Training step of GPT-2 small on an H200, {tokens}", rows)


def _say(message: str) -> None:
    Console(stderr=True).print(message, markup=False, highlight=False)


def row_of(
    name: str, report: Fp8Report, vocab: int, temporaries: int, reference: int
) -> dict[str, Any]:
    """What became of the products of a program."""
    dense = [m for m in report.matmuls if is_dense(m, vocab)]
    share = sum(m.fp8 for m in dense) / len(dense)
    row: dict[str, Any] = {
        "model": name,
        "products": len(report.matmuls),
        "FP8 kernels": len(report.fp8),
        "of all FLOPs": report.share,
        "Dense FP8": share,
        "lost products": len(report.lost),
        "amax": report.amax_reductions,
        "casts": report.casts,
        "temporaries MiB": temporaries / 2**20,
        "over bfloat16": temporaries / reference,
    }
    if name == "fp8":
        row["asked"] = "all Dense, no amax"
        row["within"] = share == 1 and report.amax_reductions == 0
    return row


def is_dense(matmul: Matmul, vocab: int) -> bool:
    """Whether a product is none of attention's own, which are batched, and none of the readout."""
    return len(_shape(matmul.out)) == 2 and not is_readout(matmul, vocab)


def is_readout(matmul: Matmul, vocab: int) -> bool:
    """Whether a product is one of the readout: forward, or by its input or table."""
    sizes = [n for text in (matmul.lhs, matmul.rhs, matmul.out) for n in _shape(text)]
    return any(vocab <= n < vocab + MOST_PADDING for n in sizes)


def _shape(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text.rpartition("[")[2])]


def memory(names: Sequence[str]) -> Table:
    """Temporaries of what FP8 is for: the MLPs of GPT-2 small, forward and backward, by policy."""
    config = load_kind(GPTConfig, CONFIGS / "gpt" / "gpt2-small.yaml", GPT2)
    shape, tokens = config.model, config.data.step_size
    rows: list[dict[str, Any]] = []
    for name in ("bfloat16", *names):
        _say(f"compiling a stack of MLPs: {name}")
        size = _temporaries(shape.layers, shape.width, shape.hidden, tokens, name) / 2**20
        ratio = size / rows[0]["temporaries MiB"] if rows else 1.0
        row = {"policy": name, "temporaries MiB": size, "over bfloat16": ratio}
        rows.append(row | (asked(ratio, most=MOST_MEMORY) if name == "fp8" else {}))
    title = (
        f"Loss and gradient of {shape.layers} MLPs, {shape.width} and {shape.hidden} wide, on an "
        f"H200, {tokens:,} tokens"
    )
    return Table(title, rows)


def _temporaries(layers: int, width: int, hidden: int, tokens: int, policy: str) -> int:
    def make() -> nnx.List:
        rngs = nnx.Rngs(0)
        return nnx.List(
            nn.MLP(width, hidden, use_bias=False, policy=policy, rngs=rngs) for _ in range(layers)
        )

    graphdef, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)

    def loss(params, rest, x):
        for layer in nnx.merge(graphdef, params, rest):
            x = layer(x)
        return jnp.mean(x.value.astype(jnp.float32) ** 2)

    x = jax.ShapeDtypeStruct((tokens, width), jnp.bfloat16)
    step = jax.value_and_grad(loss, argnums=(0, 1))  # by the scales too, which is their amax
    analysis: Any = compile_h200(step, params, rest, x).memory_analysis()
    return analysis.temp_size_in_bytes


def speeds(names: Sequence[str], steps: int) -> Table:
    """Tokens per second of a model of a billion parameters, on this machine's GPU."""
    rows: list[dict[str, Any]] = []
    for name in ("bfloat16", *names):
        path = CONFIGS / "gpt" / "parity.yaml"
        config = load_kind(GPTConfig, path, [*LARGE, f"policy={name}"])
        advance = stepper(config, random_batch(config))
        times = [seconds(advance) for _ in range(steps + 3)]
        speed = config.data.step_size / statistics.median(times[3:])
        over = speed / rows[0]["tokens per second"] if rows else 1.0
        rows.append({"policy": name, "tokens per second": speed, "over bfloat16": over})
    title = f"Training speed, 1.0 billion parameters, {jax.devices()[0].device_kind}"
    return Table(title, rows)

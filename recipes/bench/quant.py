"""What each way of choosing FP8 scales costs: loss, kernels, statistics, memory and speed.

    python -m recipes bench quant --data TEXT

Trains `configs/gpt/parity.yaml` once for each policy (as `bench parity`, whose float32 and fp8 runs
are used again), and its plain model converted and through qwix; compiles the training step of
`configs/gpt/gpt2-small.yaml` for an H200 where the CUDA plugin is installed, which needs no GPU,
and times a larger model where there is one.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import typer
from flax import nnx
from rich.console import Console

from unitscale import nn
from unitscale.analysis import compile_h200, h200_available
from unitscale.quant import Fp8Report, Matmul, check_fp8

from ..config import Config
from ..configfile import load_config
from ..data import load_corpus
from ..errors import RecipeError
from ..gpt import build
from ..optimizer import make_optimizer
from ..state import TrainState
from ..train import make_train_step
from ._converted import MISSING, converted, has_qwix, losses as converted_losses, through_qwix
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
from ._steps import stepper
from ._table import JsonPath, Table, publish, within
from .overhead import CONFIGS, GPT2, plain

MOST_WORSE = dict.fromkeys(("fp8", "fp8_dynamic", "fp8_delayed"), 0.005) | {"mxfp8": 0.003}
MOST_MEMORY = 0.8
POLICIES = "fp8,fp8_dynamic,fp8_delayed,mxfp8"
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
    config: ConfigPath = str(PARITY),
    data: DataPath = None,
    policies: Annotated[str, typer.Option(help="policies, separated by commas")] = POLICIES,
    plain_learning_rate: PlainRate = 1e-3,
    fresh: Fresh = False,
    train: Annotated[bool, typer.Option(help="train each policy, or use its finished run")] = True,
    convert: Annotated[
        bool, typer.Option(help="train the plain model converted, and through qwix")
    ] = True,
    seeds: Annotated[int, typer.Option(min=1, help="runs of each, with seeds in a row")] = 3,
    compile: Annotated[bool, typer.Option(help="compile GPT-2 small for an H200")] = True,
    steps: Annotated[int, typer.Option(min=4, help="timed steps of each policy, on a GPU")] = 20,
    json: JsonPath = None,
) -> None:
    """Prints loss, FP8 kernels, amax reductions, memory and speed by policy."""
    names = _names(policies)
    words = [*(overrides or ()), *([] if data is None else [f"data.path={data}"])]
    tables, notes = [], []
    if train:
        tables.append(losses(_runs(config, words, names, fresh)))
    if train and convert:
        rate = f"optimizer.learning_rate={plain_learning_rate}"
        base = load_config(config, [*words, "policy=float32", *PLAIN, rate])
        tables.append(converted_losses(base, seeds))
    if compile and h200_available():
        tables += [kernels(names), memory(names)]
        notes.append(
            "Compiled, not run. Dense: all products but attention's own and the readout's. amax: "
            "reductions to the greatest magnitude. Block scales have FP8 kernels from sm_100 on."
        )
        if not has_qwix():
            notes.append(f"The program through qwix: {MISSING}")
    elif compile:
        notes.append(
            "FP8 kernels and memory: not compiled; that needs the CUDA plugin for JAX, see "
            "unitscale.analysis.compile_h200."
        )
    if jax.default_backend() == "gpu":
        tables.append(speeds(names, steps))
    else:
        notes.append(f"Tokens per second: not measured, no GPU; on one, run {GPU_COMMAND}")
    publish("quant", tables, json, notes)


def _names(policies: str) -> list[str]:
    names = [name.strip() for name in policies.split(",") if name.strip()]
    for name in names:
        if name not in nn.PRESETS or nn.PRESETS[name].matmul is None:
            quantized = [key for key, policy in nn.PRESETS.items() if policy.matmul is not None]
            raise RecipeError(
                f"--policies: expected policies among {', '.join(quantized)}; got {name!r}"
            )
    return names


def _runs(config: str, words: list[str], names: Sequence[str], fresh: bool) -> dict[str, Run]:
    """The finished run of float32 and of each policy."""
    policies = ("float32", *names)
    wanted = {name: variant(config, words, name, f"policy={name}") for name in policies}
    corpus, console = load_corpus(wanted["float32"].data), Console()
    return {name: trained(one, corpus, fresh, console) for name, one in wanted.items()}


def losses(runs: dict[str, Run]) -> Table:
    """Validation loss of each run, and its distance to float32."""
    reference = runs["float32"].loss
    rows = []
    for name, run in runs.items():
        row: dict[str, Any] = {"policy": name, "validation loss": run.loss}
        if name != "float32":
            difference, most = run.loss / reference - 1, MOST_WORSE.get(name)
            row["over float32"] = difference
            if most is not None:
                row["asked"] = f"<= {most:.1%}"
                row["within"] = within(difference, (None, most))
        rows.append(row)
    columns = {"policy": "", "validation loss": ".5f", "over float32": "+.3%"}
    return Table("Validation loss in nats per byte", columns | {"asked": "", "within": ""}, rows)


def kernels(names: Sequence[str]) -> Table:
    """What an H200 would run for a training step of GPT-2 small."""
    config = load_config(CONFIGS / "gpt2-small.yaml", GPT2)
    programs: dict[str, Callable[[], Any]] = {
        name: _builder(config, name) for name in ("bfloat16", *names)
    }
    half = plain(config).model_copy(update={"policy": "bfloat16"})
    programs["plain flax.nnx"] = lambda: build(half)
    programs["plain, converted to fp8_dynamic"] = lambda: converted(half, "fp8_dynamic")
    if has_qwix():
        programs["plain, through qwix"] = lambda: through_qwix(half)
    rows, reference = [], 1
    for name, make in programs.items():
        _say(f"compiling a training step: {name}")
        of = half if name.startswith("plain") else config
        compiled = compile_step(of, make)
        analysis: Any = compiled.memory_analysis()
        temporaries = analysis.temp_size_in_bytes
        if name in ("bfloat16", "plain flax.nnx"):
            reference = temporaries
        rows.append(_row(name, check_fp8(compiled), config, temporaries, reference))
    shape = f"{config.data.batch_size} x {config.data.sequence_length} tokens"
    columns = {
        "model": "",
        "products": ",d",
        "FP8 kernels": ",d",
        "of all FLOPs": ".1%",
        "Dense FP8": ".1%",
        "lost": ",d",
        "amax": ",d",
        "casts": ",d",
        "temporaries MiB": ",.0f",
        "over bfloat16": ".3f",
        "asked": "",
        "within": "",
    }
    return Table(f"Training step of GPT-2 small on an H200, {shape}", columns, rows)


def _say(message: str) -> None:
    Console(stderr=True).print(message, markup=False, highlight=False)


def _builder(config: Config, policy: str) -> Callable[[], Any]:
    return lambda: build(config.model_copy(update={"policy": policy}))


def compile_step(config: Config, make: Callable[[], Any]) -> jax.stages.Compiled:
    """The training step of a config, with the model that `make` makes, for an H200."""
    graphdef, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    optimizer = make_optimizer(config, params)
    moments = jax.eval_shape(optimizer.init, params)
    done: Any = jax.ShapeDtypeStruct((), jnp.int32)
    shape = (config.data.batch_size, config.data.sequence_length + 1)
    batch = jax.ShapeDtypeStruct(shape, jnp.int32)
    step = make_train_step(graphdef, optimizer)
    return compile_h200(step, TrainState(params, rest, moments, done), batch, done)


def _row(
    name: str, report: Fp8Report, config: Config, temporaries: int, reference: int
) -> dict[str, Any]:
    dense = [m for m in report.matmuls if _is_dense(m, config.model.vocab)]
    share = sum(m.fp8 for m in dense) / len(dense)
    row: dict[str, Any] = {
        "model": name,
        "products": len(report.matmuls),
        "FP8 kernels": len(report.fp8),
        "of all FLOPs": report.share,
        "Dense FP8": share,
        "lost": len(report.lost),
        "amax": report.amax_reductions,
        "casts": report.casts,
        "temporaries MiB": temporaries / 2**20,
        "over bfloat16": temporaries / reference,
    }
    if name == "fp8":
        row["asked"] = "all Dense, no amax"
        row["within"] = share == 1 and report.amax_reductions == 0
    return row


def _is_dense(matmul: Matmul, vocab: int) -> bool:
    """Whether a product is none of attention's own, which are batched, and none of the readout."""
    shapes = [
        [int(n) for n in re.findall(r"\d+", text.rpartition("[")[2])]
        for text in (matmul.lhs, matmul.rhs, matmul.out)
    ]
    # XLA pads the vocabulary.
    readout = any(vocab <= n < vocab + 16 for shape in shapes for n in shape)
    return len(shapes[-1]) == 2 and not readout


def memory(names: Sequence[str]) -> Table:
    """Temporaries of what FP8 is for: the MLPs of GPT-2 small, forward and backward, by policy."""
    config = load_config(CONFIGS / "gpt2-small.yaml", GPT2)
    shape, tokens = config.model, config.data.batch_size * config.data.sequence_length
    rows: list[dict[str, Any]] = []
    for name in ("bfloat16", *names):
        _say(f"compiling a stack of MLPs: {name}")
        size = _temporaries(shape.layers, shape.width, shape.hidden, tokens, name)
        ratio = size / (rows[0]["temporaries MiB"] * 2**20) if rows else 1.0
        row: dict[str, Any] = {"policy": name, "temporaries MiB": size / 2**20}
        row["over bfloat16"] = ratio
        if name == "fp8":
            row["asked"] = f"<= {MOST_MEMORY}"
            row["within"] = within(ratio, (None, MOST_MEMORY))
        rows.append(row)
    columns = {"policy": "", "temporaries MiB": ",.0f", "over bfloat16": ".3f"}
    title = (
        f"Loss and gradient of {shape.layers} MLPs, {shape.width} and {shape.hidden} wide, on an "
        f"H200, {tokens:,} tokens"
    )
    return Table(title, columns | {"asked": "", "within": ""}, rows)


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
    analysis: Any = compile_h200(jax.value_and_grad(loss), params, rest, x).memory_analysis()
    return analysis.temp_size_in_bytes


def speeds(names: Sequence[str], steps: int) -> Table:
    """Tokens per second of a model of a billion parameters, on this machine's GPU."""
    rows: list[dict[str, Any]] = []
    for name in ("bfloat16", *names):
        config = load_config(CONFIGS / "parity.yaml", [*LARGE, f"policy={name}"])
        advance = stepper(config)
        seconds = []
        for _ in range(steps + 3):
            start = time.perf_counter()
            advance()
            seconds.append(time.perf_counter() - start)
        tokens = config.data.batch_size * config.data.sequence_length
        speed = tokens / statistics.median(seconds[3:])
        row = {"policy": name, "tokens per second": speed}
        rows.append(
            row | {"over bfloat16": speed / (rows[0]["tokens per second"] if rows else speed)}
        )
    columns = {"policy": "", "tokens per second": ",.0f", "over bfloat16": ".3f"}
    title = f"Training speed, 1.0 billion parameters, {jax.devices()[0].device_kind}"
    return Table(title, columns, rows)

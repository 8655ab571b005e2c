"""What `bench gpu` measures, part by part: each measured time beside that projected of its program.

A part runs in a process of its own, which has the GPU to itself: what one part takes or breaks is
nothing to the next, and its peak of memory is its own.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from unitscale import ops
from unitscale.core import cast
from unitscale.optim import ScaledTransformation
from unitscale.quant import MatmulConfig

from ..errors import RecipeError
from ..gpt.task import build
from ..registry import CONFIGS
from ..run.optimizer import make_optimizer
from ._compare import compare, comparison
from ._profile import kernel_times, measured_kinds
from ._programs import (
    BEST,
    MORE,
    PEER,
    REFERENCE,
    ROWS,
    SHAPES,
    config_of,
    fused_attention,
    program_of,
)
from ._runs import Told
from ._tasks import split_articles, task_words
from ._timing import train_step
from .aot import roofline
from .lms import tuned

ROUNDS = 5  # of which the median is taken
VARIED = 4  # inputs that differ, in turns


class Setting(NamedTuple):
    """What every part is told: toy size, a text, a folder for training runs, and questions."""

    toy: bool = False
    data: str | None = None
    folder: Path = Path("runs")
    squad: str | None = None


Rows = list[dict[str, Any]]
Part = Callable[[Setting], Rows]


def per_call(call: Callable[[int], Any], calls: int, rounds: int = ROUNDS) -> float:
    """Median seconds of a call, over rounds of calls of which only the last is waited for.

    Args:
      call: Of the number of the call; returns what to wait for.
      calls: In a round. A first round is not counted.
      rounds: That are.
    """
    numbers = itertools.count()
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        result = None
        for _ in range(calls):
            result = call(next(numbers))
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[1:])


def beside(seconds: float, program: Any) -> dict[str, Any]:
    """The columns of a measured time and of the projection of the program that took it."""
    report = roofline(program)
    projected = report.seconds
    row = {"measured ms": 1e3 * seconds, "projected ms": 1e3 * projected}
    row["over projected"] = seconds / projected if projected else float("nan")
    if report.flops:
        row["TFLOP/s"] = round(report.flops / seconds / 1e12, 1)
    row["GB/s"] = round(report.bytes / seconds / 1e9, 1)
    return row


def step(shape: str, row: str, setting: Setting) -> Rows:
    """One row: training steps, tokens per second and memory."""
    gpu = on_gpu()
    config = config_of(shape, row, toy=setting.toy)
    train, state = train_step(config)
    size = (config.data.batch_size, config.data.sequence_length + 1)
    draw = np.random.default_rng(0).integers
    batches = [
        jax.device_put(draw(0, config.model.vocab, size).astype(np.int32)) for _ in range(VARIED)
    ]
    with fused_attention() if gpu else nullcontext():
        compiled = train.lower(state, batches[0], np.int32(0)).compile()
    program = program_of(config, compiled, state, gpu=gpu)
    values: Any = None

    def call(index: int) -> Any:
        nonlocal state, values
        state, values = compiled(state, batches[index % VARIED], np.int32(index))
        return values

    seconds = per_call(call, 1 if setting.toy else 5)
    times = program.times()
    projected = times.pop("projected ms")
    found: dict[str, Any] = {
        "program": row,
        "measured ms": 1e3 * seconds,
        "projected ms": projected,
        "over projected": 1e3 * seconds / projected,
        "tokens per second": config.data.step_size / seconds,
        "projected tokens per second": 1e3 * config.data.step_size / projected,
        "peak MiB": peak_mib(),
        "loss": float(values["loss"]),
    }
    found |= measured_kinds(kernel_times(lambda: call(0)))
    return [found | {f"projected {k}": v for k, v in times.items()} | program.contents()]


def products(setting: Setting) -> Rows:
    """FP8 products beside 16-bit ones, and what the memory reaches."""
    sizes = (
        [(64, 32, 48)] if setting.toy else [(32768, 768, 3072), (32768, 2048, 5632), (8192,) * 3]
    )
    e4m3, e5m2 = jnp.float8_e4m3fn, jnp.float8_e5m2
    rows = []
    for (m, k, n), (left, right) in itertools.product(
        sizes, [(jnp.bfloat16, jnp.bfloat16), (e4m3, e4m3), (e5m2, e4m3)]
    ):
        xs = [_normal(seed, (m, k), left) for seed in range(VARIED)]
        w = _normal(VARIED, (n, k), right)
        name = f"{jnp.dtype(left).name} x {jnp.dtype(right).name}, {m:,} x {k:,} x {n:,}"
        rows.append({"work": name, **_measure(_product, [(x, w) for x in xs], setting)})
    for (m, k, n), (how, work) in itertools.product(sizes[:2], WEIGHT_GRADIENTS.items()):
        pairs = [
            (_normal(seed, (m, k), jnp.bfloat16), _normal(VARIED + seed, (m, n), jnp.bfloat16))
            for seed in range(VARIED)
        ]
        name = f"weight gradient, {how}, {m:,} x {k:,} x {n:,}"
        rows.append({"work": name, **_measure(work, pairs, setting)})
    length = 2**12 if setting.toy else 2**29
    xs = [(_normal(seed, (length,), jnp.bfloat16),) for seed in range(2)]
    rows.append({"work": f"copy of {length:,} bfloat16", **_measure(lax.neg, xs, setting)})
    return rows


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def _summed_over_rows(x: jax.Array, dy: jax.Array) -> jax.Array:
    return lax.dot_general(x, dy, (((0,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16)


def _cast_and_summed(x: jax.Array, dy: jax.Array) -> jax.Array:
    return _summed_over_rows(*(cast(z, "e4m3fn") for z in (x, dy)))


def _of_dense(x: jax.Array, dy: jax.Array) -> jax.Array:
    w = jnp.zeros((x.shape[1], dy.shape[1]), jnp.bfloat16)  # on which its gradient does not depend
    config = MatmulConfig(cotangent="e4m3fn")
    return jax.vjp(lambda w: ops.dense(x, w, config=config).data, w)[1](dy)[0]


WEIGHT_GRADIENTS: dict[str, Callable[..., jax.Array]] = {
    "bfloat16": _summed_over_rows,
    "FP8 as XLA turns it": _cast_and_summed,
    "FP8 of ops.dense": _of_dense,
}
"""Casts included."""


def attention(setting: Setting) -> Rows:
    """Attention of each shape, forward and backward, by the kernel and plain."""
    rows = []
    for shape, kernel in itertools.product(SHAPES, ("cudnn", "xla")):
        if kernel == "cudnn" and not on_gpu():
            continue
        config = config_of(shape, BEST, toy=setting.toy)
        model, data = config.model, config.data
        heads, kv = model.heads, model.kv_heads or model.heads
        sizes = [
            (data.batch_size, data.sequence_length, n, model.head_dim) for n in (heads, kv, kv)
        ]
        inputs = [
            tuple(_normal(3 * turn + i, size, jnp.bfloat16) for i, size in enumerate(sizes))
            for turn in range(VARIED)
        ]

        def loss(q, k, v, kernel: Any = kernel):
            mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)
            return jnp.sum(mixed.astype(jnp.float32) ** 2)

        work = jax.grad(loss, argnums=(0, 1, 2))
        rows.append({"work": f"{shape}, {kernel}", **_measure(work, inputs, setting)})
    return rows


def optimizer(setting: Setting) -> Rows:
    """The update of all parameters, donated, of GPT-2 small."""
    rows = []
    for row in ("fp8", BEST):
        config = config_of("gpt2-small", row, toy=setting.toy)
        params = nnx.state(build(config), nnx.Param)
        tx = make_optimizer(config, params)
        grads = [
            jax.tree.map(lambda x, seed=seed: _normal(seed, x.shape, jnp.float32), params)
            for seed in range(2)
        ]
        if isinstance(tx, ScaledTransformation):
            params, update = tx.scale_params(params), tx.step
        else:
            update = partial(_apply, tx)
        state = tx.init(params)
        program = jax.jit(update, donate_argnums=(0, 1)).lower(params, state, grads[0]).compile()

        def call(index: int, program=program, grads=grads) -> Any:
            nonlocal params, state
            params, state = program(params, state, grads[index % len(grads)])
            return params

        seconds = per_call(call, 1 if setting.toy else 10)
        rows.append({"work": f"AdamW, {row}", **beside(seconds, program)})
    return rows


def _apply(tx: Any, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    updates, state = tx.update(grads, state, params)
    return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates), state


def losses(setting: Setting) -> Rows:
    """Validation losses of `configs/gpt/parity.yaml` in float32, float16 and FP8."""
    entry = comparison("parity").only("--policies", "float16,fp8")
    words = [f"train.runs_dir={setting.folder}"]
    if setting.toy:
        words += ["train.steps=2", "model.width=16", "model.layers=1", "optimizer.warmup_steps=0"]
    told = Told(None, words, 2 if setting.toy else 3, False, setting.data and [setting.data])
    return [dict(row) for row in compare(entry, told).table().rows]


def answers(setting: Setting) -> Rows:
    """F1 on SQuAD of `configs/bert/medium.yaml`, trained and tuned in FP8, beside baselines."""
    if setting.squad is None:
        raise RecipeError("--squad: expected a file of SQuAD's format; got none; give it")
    words, tuning = [f"train.runs_dir={setting.folder}"], ["data.batch_size=32", "train.steps=3000"]
    if setting.toy:
        few = ["train.steps=2", "optimizer.warmup_steps=0", "data.batch_size=4"]
        small = ["model.width=16", "model.layers=1", "model.heads=2", "data.sequence_length=32"]
        small += ["data.tokenizer.vocab=512", "data.validation_fraction=0.2"]
        words, tuning = [*words, *few, *small], [*few, "squad.max_question_length=8"]
    told = Told(str(CONFIGS / "bert/medium.yaml"), words, 1, False, setting.data and [setting.data])
    articles = split_articles(setting.squad, setting.folder)
    pretrained = compare(comparison("lms").of(["fp8"]), told)
    asked = task_words(None, articles, pretrained.configs["fp8"][0].longest)
    (scored,) = tuned(pretrained, asked, Told(None, tuning, 1))
    return [dict(row) for row in [*pretrained.table().rows, *scored.rows]]


def tests(setting: Setting) -> Rows:
    """The tests marked gpu."""
    root = CONFIGS.parent
    marked = [str(p) for p in (root / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-q", *marked]
    command += ["--collect-only"] if setting.toy else []
    # The tests ask the environment whether there is a GPU.
    told = {} if setting.toy else {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS") or "cuda"}
    found = subprocess.run(
        command, cwd=root, env=os.environ | told, capture_output=True, text=True, check=False
    )
    print(found.stdout, found.stderr, sep="\n")
    last = found.stdout.strip().splitlines()[-1:] or found.stderr.strip().splitlines()[-1:]
    # Where the tests are left out, for want of a GPU, there are none: 5.
    passed = found.returncode == 0 or (setting.toy and found.returncode == 5)
    if not passed:
        raise RecipeError(f"tests marked gpu: {' '.join(last)}", exit_code=1)
    return [{"tests": "marked gpu", "result": " ".join(last)}]


STEPS = {f"{shape} {row}": partial(step, shape, row) for shape in SHAPES for row in (*ROWS, *MORE)}
_FIRST = [f"gpt2-small {row}" for row in (REFERENCE, PEER, BEST)]
PARTS: dict[str, Part] = {
    **{name: STEPS[name] for name in _FIRST},
    "tests": tests,
    "products": products,
    "attention": attention,
    "optimizer": optimizer,
    **{name: part for name, part in STEPS.items() if name.startswith("gpt2")},
    "losses": losses,
    **{name: part for name, part in STEPS.items() if not name.startswith("gpt2")},
    "answers": answers,
}
"""By name, those first that say most for their time: a step takes one to two minutes to compile."""
USUAL = [name for name in PARTS if name not in {f"{s} {row}" for s in SHAPES for row in MORE}]
"""What is measured unless others are asked for."""


def on_gpu() -> bool:
    """Whether programs run on a GPU."""
    return jax.default_backend() == "gpu"


def peak_mib() -> float | None:
    """The most memory that this process had at a time; None where the device does not count."""
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return None if peak is None else peak / 2**20


def _measure(f: Callable[..., Any], inputs: Sequence[tuple], setting: Setting) -> dict[str, Any]:
    program = jax.jit(f).lower(*inputs[0]).compile()
    seconds = per_call(
        lambda index: program(*inputs[index % len(inputs)]), 1 if setting.toy else 50
    )
    return beside(seconds, program)


def _normal(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)

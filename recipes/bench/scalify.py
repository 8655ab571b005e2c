"""What `unitscale.scalify` gives and what it costs, on programs written without it.

    python -m recipes bench scalify --data TEXT

Trains the GPT of `configs/gpt/parity.yaml` in plain `flax.nnx`: in float32, and under scalify in
float32, in float16 (parameters and Adam's state too) and with FP8 products and gradients. Then the
time of a step, the time to compile it, the operations that scales add, and programs that plain
float16 cannot compute.
"""

import statistics
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import typer

from unitscale import as_scaled, to_array
from unitscale.transforms import scalify as transform

from ._compare import compare, comparison, configs_of
from ._operations import counted
from ._runs import ConfigPath, DataPaths, Fresh, Jobs, Overrides, PlainRate, Seeds, Told
from ._table import JsonPath, Table, asked, publish
from ._timing import compared, compiled, interleaved, random_batch, stepper, train_step

FORMATS = "float32,float16,fp8"
MOST_TIME, MOST_COMPILE, MOST_ERROR = 1.03, 1.5, 0.02


def main(
    overrides: Overrides = None,
    config: ConfigPath = None,
    data: DataPaths = None,
    plain_learning_rate: PlainRate = None,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    fresh: Fresh = False,
    runs: Annotated[bool, typer.Option(help="train the models")] = True,
    formats: Annotated[str, typer.Option(help="formats to train in, by commas")] = FORMATS,
    rounds: Annotated[int, typer.Option(min=4, help="timed steps of each program")] = 40,
    compilations: Annotated[int, typer.Option(min=1, help="of each program")] = 3,
    json: JsonPath = None,
) -> None:
    """Prints losses, step times and compile times under scalify, and programs of wide range."""
    entry = comparison("scalify")
    wanted = entry.only("--formats", formats, prefix="scalify-")
    told = Told(config, overrides, seeds, fresh, data, jobs)
    own = entry.at_rate(plain_learning_rate)
    tables = compare(wanted, told, own).tables() if runs else []
    three = "scalify-float32", "scalify-float16", "plain-float32"
    scaled, half, plain = (configs_of(entry, told, name, own[name])[0] for name in three)
    tables += [costs(scaled, half, plain, rounds, compilations), counted(), extremes(programs())]
    notes = [
        f"learning rate {plain.optimizer.learning_rate:g}, no loss scale; loss over all validation "
        "text. float16: parameters, Adam's state and activations; fp8: as float16, operands of "
        "linear layers in E4M3 and the gradients of their outputs in E5M2, no dynamic rescale. "
        "Readout and attention products stay float16.",
        "Everyday functions, each at three input scales: pytest tests/transforms -k "
        "value_and_gradient. The rule of every primitive: notebooks/scalify-coverage.md.",
    ]
    publish("scalify", tables, json, notes)


def costs(scaled: Any, half: Any, plain: Any, rounds: int, compilations: int) -> Table:
    """Time of a step in float32, and time to trace and compile it, scalified over plain."""
    each = [[_compile_time(c) for c in (scaled, half, plain)] for _ in range(compilations)]
    ours, narrow, theirs = (statistics.median(times) for times in zip(*each, strict=True))
    batch = random_batch(plain)
    times = interleaved(stepper(scaled, batch), stepper(plain, batch), rounds)

    def compiling(seconds: float) -> dict[str, float]:
        over = seconds / theirs
        return {"scalify ms": 1e3 * seconds, "plain ms": 1e3 * theirs, "ratio": over}

    rows: list[dict[str, Any]] = [
        {"what": "step", **compared("scalify", "plain", times, MOST_TIME)},
        {
            "what": "trace and compile",
            **compiling(ours),
            **asked(ours / theirs, most=MOST_COMPILE),
        },
        {"what": "... scalify in float16", **compiling(narrow)},
    ]
    return Table("Cost of scalify in float32", rows)


def _compile_time(config: Any) -> float:
    step, state = train_step(config)
    return compiled(lambda: step.lower(state, random_batch(config), np.int32(0)))[1]


class Program(NamedTuple):
    """A function of arrays, the float32 arrays it is given, and what it is."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def _normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def _loss(weights: Any, x: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(x @ weights["up"])
    return jnp.mean((hidden @ weights["down"]) ** 2)


def _chain(x: jax.Array, kernel: jax.Array) -> jax.Array:
    for _ in range(60):
        x = x @ kernel
    return x


def programs() -> list[Program]:
    """What plain float16 overflows or underflows on; the float32 answer is in float32's range."""
    width = 128
    weights = {"up": 1e-6 * _normal(0, width, 256), "down": 1e-6 * _normal(1, 256, width)}
    # 60 products that grow, or shrink, by 1.7 each: 7e13 and 1.5e-14 together.
    step = _normal(2, width, width) / width**0.5
    x = _normal(3, 32, width)
    return [
        Program("weights near 1e-6, inputs near 1e6", lambda w, x: x @ w, (weights["up"], 1e6 * x)),
        Program("... gradient of a loss", jax.grad(_loss), (weights, 1e6 * x)),
        Program("60 products in a row, growing", _chain, (x, 1.7 * step)),
        Program("60 products in a row, shrinking", _chain, (x, step / 1.7)),
        Program(
            "... gradient of their mean square",
            jax.grad(lambda k, x: jnp.mean(_chain(x, k) ** 2)),
            (step / 1.3, x),
        ),
        Program("layer norm of values near 1e6", _layer_norm, (1e6 * x,)),
    ]


def _layer_norm(x: jax.Array) -> jax.Array:
    centred = x - jnp.mean(x, -1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5)


def error(found: Any, expected: Any) -> float:
    """Largest relative RMS error over the leaves; NaN where something is not finite."""
    errors = []
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        errors.append(float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))))
    return float(np.max(errors))


def extremes(wide: list[Program]) -> Table:
    """Relative RMS error against float32, of float16 without and with scalify."""
    rows = []
    for name, function, arguments in wide:
        expected = jax.jit(function)(*arguments)
        half = jax.tree.map(lambda x: x.astype(jnp.float16), arguments)
        ours = to_array(jax.jit(transform(function))(*as_scaled(arguments, dtype=jnp.float16)))
        found = error(ours, expected)
        rows.append(
            {
                "program": name,
                "plain float16": error(jax.jit(function)(*half), expected),
                "scalify float16": found,
                **asked(found, most=MOST_ERROR, form=".0%"),
            }
        )
    return Table("Relative RMS error against float32", rows)

"""Compile time, step time and code of unit scaling, and of scalify, beside plain `flax.nnx`.

    python -m recipes bench overhead
    python -m recipes bench scalify --data TEXT --seeds 5

`overhead`: CPU time to trace and compile the step of `configs/gpt/quickstart.yaml` in FP8 and with
scaled optimizer state; step time of `configs/gpt/parity.yaml` in float32, in turns; and files and
functions of the library that run while programs are traced. `scalify`: losses of the plain GPT of
`configs/gpt/parity.yaml` under scalify in float16 (parameters and Adam's state too) and with FP8
matmuls and gradients, over float32; then times of a step and of compiling it.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import typer
from flax import nnx

import unitscale
from unitscale import as_scaled, nn, optim, scalify

from ..config import PrecisionConfig
from ..gpt.config import GPTConfig
from ..registry import CONFIGS, load_kind
from . import runs
from .step import compile_times, stepper, time_ratio

# Layers, and settings of ours beside those of the plain model.
COMPILED: dict[str, tuple[int, tuple[str, ...]]] = {
    "fp8": (12, ("precision.policy=fp8",)),
    "fp8, scaled optimizer": (
        4,
        (
            "precision.policy=fp8",
            "precision.weights=float16",
            "precision.moments=[float8_e4m3fn,float16]",
        ),
    ),
}
MOST_COMPILING, MOST_TIME = 1.8, 1.05
# Files and functions.
MOST_CODE = {"FP8 Dense": (14, 90), "scalify": (9, 90), "scaled optimizer": (8, 70)}

SCALIFY = {
    "float16": "precision=scalify_float16",
    "fp8": "precision=scalify_fp8",
    "float32": "precision.scalify=float32",
    "bfloat16": "precision=scalify_bfloat16",
}
SCALIFY_BOUNDS = {"scalify-float16": 0.002, "scalify-fp8": 0.005}
MOST_SCALIFIED_TIME, MOST_SCALIFIED_COMPILING = 1.03, 1.5


def main(
    overrides: runs.Overrides = None,
    steps: Annotated[int, typer.Option(min=0, help="timed steps of each library")] = 40,
    json: runs.JsonPath = None,
) -> None:
    """Prints ratios over plain flax.nnx of compiling and step time; code that runs."""
    jax.config.update("jax_enable_compilation_cache", False)
    rows = [compiling(name, *how, overrides or []) for name, how in COMPILED.items()]
    tables = [runs.Table("Trace and compile a training step, over plain flax.nnx", rows)]
    if steps:
        words = ["precision.policy=float32", *(overrides or [])]
        config = load_kind(GPTConfig, CONFIGS / "gpt" / "parity.yaml", words)
        found = time_ratio(stepper(config), stepper(plain(config)), steps)
        rows = [found | runs.asked(found["ratio"], MOST_TIME)]
        tables.append(runs.Table("Time of a training step in float32, over plain flax.nnx", rows))
    rows = [code(name, function) for name, function in ways().items()]
    tables.append(runs.Table("Code of the library that runs while a program is traced", rows))
    runs.publish("overhead", tables, json)


def plain(config: GPTConfig) -> GPTConfig:
    model = config.model.model_copy(update={"library": "plain"})
    optimizer = config.optimizer.model_copy(update={"umup": False})
    return config.model_copy(
        update={"precision": PrecisionConfig(), "model": model, "optimizer": optimizer}
    )


def compiling(
    name: str, layers: int, settings: tuple[str, ...], overrides: list[str]
) -> dict[str, Any]:
    """CPU seconds and lines of optimized HLO of a step, over those of the plain model's."""
    words = [f"model.layers={layers}", "optimizer.name=adamw", *overrides]
    path = CONFIGS / "gpt" / "quickstart.yaml"
    configs = {"": load_kind(GPTConfig, path, [*words, *settings])}
    configs["plain "] = plain(load_kind(GPTConfig, path, words))
    row: dict[str, Any] = {"step": name, "layers": configs[""].model.layers}
    for prefix, config in configs.items():
        row[f"{prefix}trace s"], row[f"{prefix}s"], program = compile_times(config)
        row[f"{prefix}HLO lines"] = (program.as_text() or "").count("\n")
    row |= {"trace ratio": row["trace s"] / row["plain trace s"]}
    ratio = row["s"] / row["plain s"]
    return row | {"ratio": ratio, **runs.asked(ratio, MOST_COMPILING)}


def ways() -> dict[str, Callable[[], Any]]:
    """Three ways through the library, each a function that traces it anew."""
    layer, x = nn.Dense(16, 32, policy="fp8", rngs=nnx.Rngs(0)), jnp.ones((4, 16))
    a, b = as_scaled(jnp.ones((4, 8))), as_scaled(jnp.ones((8, 4)))
    transformation = optim.scaled(optax.adam(1e-3))
    grads = {"w": jnp.ones((64, 64)), "b": jnp.ones(64)}  # `b` is too small to be scaled
    params = transformation.scale_params(grads)
    state = transformation.init(params)
    return {
        "FP8 Dense": lambda: nnx.grad(lambda layer: layer(x).value.sum())(layer),
        "scalify": lambda: scalify(lambda a, b: (a * 2.5 * a) @ b)(a, b),
        "scaled optimizer": lambda: transformation.update(grads, state, params),
    }


def code(name: str, function: Callable[[], Any]) -> dict[str, Any]:
    """Files and functions of the library that a function calls; lambdas and the like aside."""
    root, seen = str(Path(unitscale.__file__).parent), set()

    def look(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and code.co_name[0] != "<":
            seen.add((code.co_filename, code.co_qualname))

    jax.clear_caches()
    sys.setprofile(look)
    function()
    sys.setprofile(None)
    files, most = len({file for file, _ in seen}), MOST_CODE[name]
    row = {"what": name, "files": files, "functions": len(seen)}
    within = files <= most[0] and len(seen) <= most[1]
    return row | {"asked": "<= {} and {}".format(*most), "within": within}


def scalified(
    overrides: runs.Overrides = None,
    config: runs.ConfigPath = None,
    data: runs.DataPaths = None,
    formats: Annotated[str, typer.Option(help=f"of {', '.join(SCALIFY)}")] = "float16,fp8",
    rounds: Annotated[int, typer.Option(min=0, help="timed steps; 0 for none")] = 40,
    seeds: runs.Seeds = 1,
    jobs: runs.Jobs = 1,
    fresh: runs.Fresh = False,
    json: runs.JsonPath = None,
) -> None:
    """Prints losses, step times and compile times under scalify."""
    words = runs.plain_words()
    variants = {"plain-float32": words}
    for name in runs.chosen("--formats", formats, SCALIFY):
        variants[f"scalify-{name}"] = (*words, SCALIFY[name])
    told = runs.Told(config, overrides, seeds, fresh, data, jobs)
    tables = runs.compare(variants, told).tables("Validation loss", SCALIFY_BOUNDS)
    if rounds:
        path, given = config or CONFIGS / runs.PARITY, [*(overrides or []), *words]
        exact, half = (
            load_kind(GPTConfig, path, [*given, SCALIFY[name]]) for name in ("float32", "float16")
        )
        reference = load_kind(GPTConfig, path, given)
        found = time_ratio(stepper(exact), stepper(reference), rounds)
        rows = [found | runs.asked(found["ratio"], MOST_SCALIFIED_TIME)]
        tables.append(runs.Table("Time of a step, scalify in float32 over plain", rows))
        seconds, rows = compile_times(reference)[1], []
        for name, one in (("float32", exact), ("float16", half)):
            row: dict[str, Any] = {"storage": name, "s": compile_times(one)[1], "plain s": seconds}
            row["ratio"] = row["s"] / seconds
            most = {"float32": MOST_SCALIFIED_COMPILING}.get(name)
            rows.append(row | (runs.asked(row["ratio"], most) if most else {}))
        tables.append(runs.Table("Trace and compile, over plain", rows))
    runs.publish("scalify", tables, json)

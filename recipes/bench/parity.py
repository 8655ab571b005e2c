"""Compare losses in 16 and 8 bits with float32, count underflow, and measure rounding by operand.

    python -m recipes bench parity --data TEXT --data ANOTHER --seeds 5
    python -m recipes bench parity --rounding --data TEXT

Trains `configs/gpt/parity.yaml` in each format, on each text and with each seed, without a loss
scale. All runs start from weights rounded to E4M3, so that every format starts from the same
weights: runs from weights that differ by a rounding end almost as far apart as runs of different
seeds. Underflow is counted in the first float16 run and in a plain `flax.nnx` run. `--rounding`
evaluates and differentiates the trained float32 models with some matmuls in FP8 and the rest in
bfloat16.
"""

import dataclasses
from collections.abc import Callable
from itertools import islice
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from flax import nnx

from unitscale import nn
from unitscale.quant import PRESETS, Block, MatmulConfig

from ..config import PrecisionConfig, RunConfig
from ..recipe import recipe_of
from ..run.state import build_model, init_state, load_trained
from ..run.step import make_evaluation, make_loss, mean_loss, over_amax
from . import runs

SPECIAL = {
    "fp8-readout": ("precision.policy=fp8", "precision.readout=true"),
    "fp8-readout-gradients": ("precision.policy=fp8", "precision.readout=gradients"),
    "gradients-bfloat16": ("precision.gradients=bfloat16",),
    "gradients-fp8": ("precision.gradients=float8_e4m3fn",),
    "nvfp4-last": ("precision.policy=nvfp4", "precision.layers={'stack.layers.3.*': bfloat16}"),
    "nvfp4-mixed": ("precision.policy=nvfp4", "precision.layers={'*.value': fp8, '*.out': fp8}"),
    "fp8-rebalance": ("precision.policy=fp8", "precision.monitor=1e-4", "precision.rebalance=true"),
}  # variants that set more than a policy
BOUNDS = {"float16": 0.001, "fp8": 0.002, "mxfp8": 0.002, "fp8_dynamic": 0.005}
BOUNDS |= {"nvfp4": 0.01, "nvfp4-last": 0.01, "nvfp4-mixed": 0.01}
BOUNDS |= {"gradients-bfloat16": 0.001, "gradients-fp8": 0.002}
BATCHES = 8

E4M3, E5M2, WIDE = "float8_e4m3fn", "float8_e5m2", "bfloat16"
LAYERS = ("query", "key", "value", "out", "up", "down")


def main(
    overrides: runs.Overrides = None,
    config: runs.ConfigPath = None,
    data: runs.DataPaths = None,
    policies: Annotated[str, typer.Option(help=f"also {', '.join(SPECIAL)}")] = "float16,fp8",
    gradients: Annotated[bool, typer.Option(help="also count underflow in float16")] = True,
    rounding: Annotated[bool, typer.Option("--rounding", help="loss by matmul in FP8")] = False,
    seeds: runs.Seeds = 1,
    jobs: runs.Jobs = 1,
    fresh: runs.Fresh = False,
    json: runs.JsonPath = None,
) -> None:
    """Print validation loss by number format, and gradients that underflow in float16."""
    told = runs.Told(config, overrides, seeds, fresh, data, jobs)
    names = ["float32", *runs.listed(policies)]
    start = "precision.initial=float8_e4m3fn"
    variants = {n: (start, *SPECIAL.get(n, (f"precision.policy={n}",))) for n in names}
    if rounding:
        exact = runs.compare({"float32": variants["float32"]}, told).configs["float32"]
        return runs.publish("parity", [by_operand(exact)], json)
    found = runs.compare(variants, told)
    tables = found.tables("Validation loss", BOUNDS)
    if gradients:
        half: dict[str, tuple[str, ...]] = {"float16": (start, "precision.policy=float16")}
        half["plain-float16"] = runs.plain_words(runs.PLAIN_RATE, "precision.policy=float16")
        both = runs.compare(half, told._replace(seeds=1, data=data and data[:1])).configs
        lost = [lost_gradients(name, both[name][0]) for name in half]
        title = "Gradient entries that are zero in float16 and not in float32"
        tables.append(runs.Table(title, [row for pair in zip(*lost, strict=True) for row in pair]))
    notes = ["No loss scale; loss over the whole validation text."]
    runs.publish("parity", tables, json, notes)


def lost_gradients(library: str, config: RunConfig) -> list[dict[str, Any]]:
    """Count gradient entries that are 0 in float16 but not in float32, before and after a run."""
    graphdefs = []
    for policy in ("float32", config.precision.policy):
        model = build_model(config.model_copy(update={"precision": PrecisionConfig(policy=policy)}))
        graphdefs.append(nnx.split(model, nnx.Param, ...)[0])
    exact, narrow = (jax.jit(gradient(graphdef)) for graphdef in graphdefs)
    batches = list(islice(recipe_of(config).load_data(config).validation(), BATCHES))
    rows, tiny = [], float(jnp.finfo(jnp.float16).tiny)
    states = {"at first": init_state(config)[2], "at the end": load_trained(config, print)[1]}
    for when, state in states.items():
        counts = np.zeros(4, int)
        for batch in batches:
            pair = (f(state.params, state.rest, batch) for f in (exact, narrow))
            for wide, half in zip(*map(jax.tree.leaves, pair), strict=True):
                wide, half = np.asarray(wide), np.asarray(half)
                lost = np.count_nonzero((half == 0) & (wide != 0))
                subnormal = np.count_nonzero((half != 0) & (np.abs(half) < tiny))
                counts += [wide.size, lost, subnormal, np.count_nonzero(~np.isfinite(half))]
        names = ("entries", "lost", "subnormal", "not finite")
        row = {"when": when, "library": library, **dict(zip(names, map(int, counts), strict=True))}
        rows.append(row | {"share lost": row["lost"] / row["entries"]})
    return rows


def gradient(graphdef: nnx.GraphDef) -> Callable[..., Any]:
    """Make a function of `(params, rest, batch)` that returns gradients, without dropout."""
    value_of = make_loss(graphdef)

    def compute(params: Any, rest: Any, batch: Any) -> Any:
        amax, of_amax = over_amax(value_of, rest)
        return jax.grad(of_amax, (0, 1))(params, amax, batch)[0]

    return compute


def in_formats(lhs: str, rhs: str, cotangent: str, **options: Any) -> nn.Policy:
    """Make a policy with these formats in matmuls, and bfloat16 elsewhere."""
    matmul = MatmulConfig(lhs=lhs, rhs=rhs, cotangent=cotangent, **options)
    return nn.Policy(compute_dtype=WIDE, matmul=matmul, readout=matmul)


def _everywhere(policy: nn.Policy | str, layers: tuple[str, ...] = LAYERS) -> dict[str, Any]:
    return {f"*.{name}": policy for name in layers}


CHANGED: dict[str, dict[str, Any]] = {
    "": {},
    ", no Hadamard transform": {"hadamard": False},
    ", not dithered": {"dither": False},
    ", weights in 16 x 16": {"strategy": Block(16, (1, 2, 1), E4M3, adaptive=True)},
    ", not adaptive": {"strategy": Block(16, 1, E4M3)},
    ", a scale per tensor": {"strategy": PRESETS["nvfp4_dynamic"].strategy},
}  # ingredients of NVFP4, and what replaces them
ROUNDED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "activations": _everywhere(in_formats(E4M3, WIDE, WIDE)),
    "weights": _everywhere(in_formats(WIDE, E4M3, WIDE)),
    "cotangents": _everywhere(in_formats(WIDE, WIDE, E4M3)),
    "cotangents in E5M2": _everywhere(in_formats(WIDE, WIDE, E5M2)),
    "cotangents, dithered": _everywhere(in_formats(WIDE, WIDE, E4M3, dither=True)),
    "all": _everywhere("fp8"),
    "all, dynamic": _everywhere("fp8_dynamic"),
    "all, blocks of 32": _everywhere("mxfp8"),
    **{
        f"all, NVFP4{name}": _everywhere(
            nn.Policy(compute_dtype=WIDE, matmul=dataclasses.replace(PRESETS["nvfp4"], **changed))
        )
        for name, changed in CHANGED.items()
    },
    **{name: _everywhere("fp8", (name,)) for name in LAYERS},
    "readout": {"readout": in_formats(E4M3, E4M3, E5M2)},
    "readout's gradients": {
        "readout": nn.Policy(compute_dtype=WIDE, loss=MatmulConfig(cotangent=E5M2))
    },
}  # policies by pattern of layers


def by_operand(configs: list[RunConfig]) -> runs.Table:
    """Measure loss increase and gradient error of trained models, by the operands in FP8."""
    states = [load_trained(config, print)[1] for config in configs]
    texts = [list(islice(recipe_of(c).load_data(c).validation(), 32)) for c in configs]
    values: dict[str, list[float]] = {}
    errors: dict[str, float] = {}
    exact: list[Any] = []
    for name, rules in {"float32": {}, **ROUNDED}.items():
        precision = PrecisionConfig(policy="float32" if name == "float32" else WIDE)
        model: Any = build_model(configs[0].model_copy(update={"precision": precision}))
        nn.set_policies(model, rules)
        graphdef = nnx.split(model, nnx.Param, ...)[0]
        evaluate, differentiate = make_evaluation(graphdef), jax.jit(gradient(graphdef))
        pairs = list(zip(states, texts, strict=True))
        values[name] = [mean_loss(evaluate, s.params, s.rest, text) for s, text in pairs]
        grads = [differentiate(s.params, s.rest, batch) for s, text in pairs for batch in text[:2]]
        exact = exact or grads
        errors[name] = float(np.mean([error(*pair) for pair in zip(grads, exact, strict=True)]))
        jax.clear_caches()
    rows = [r | {"gradient error": errors[r["variant"]]} for r in runs.differences(values, {})]
    title = f"Rounding, {len(configs)} models of {configs[0].train.steps} steps, by what is in FP8"
    return runs.Table(title, rows)


def error(ours: Any, exact: Any) -> float:
    """Average the relative errors, in norm, of the gradients of kernels."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True)
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in wide if b.ndim > 1]
    return float(np.mean(errors))

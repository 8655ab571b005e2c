"""Where FP8 loses: each role and each operand of a trained model alone in 8 bits.

    python -m recipes bench formats --data TEXT --seeds 3

Nothing is trained but the float32 runs of `bench parity`. Their last parameters are evaluated and
differentiated once more, with some products in FP8 and everything else in bfloat16, so that two
numbers differ by rounding alone and not by what a seed makes of it.
"""

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import typer
from flax import nnx

from unitscale import nn
from unitscale.quant import MatmulConfig

from ..config import RunConfig
from ..run.evaluate import make_evaluation, mean_loss
from ..run.recipe import recipe_of
from ._compare import compare, comparison, judged
from ._runs import ConfigPath, DataPaths, Fresh, Jobs, Overrides, Seeds, Told, digest_of, last_state
from ._table import JsonPath, Table, publish
from ._underflow import gradient

E4M3, E5M2, WIDE = "float8_e4m3fn", "float8_e5m2", "bfloat16"
REFERENCE = "float32"


def in_formats(lhs: str, rhs: str, cotangent: str, *, dither: bool = False) -> nn.Policy:
    """A policy whose products have these formats; all else is in bfloat16."""
    matmul = MatmulConfig(lhs=lhs, rhs=rhs, cotangent=cotangent, dither=dither)
    return nn.Policy(compute_dtype=WIDE, matmul=matmul)


class Variant(NamedTuple):
    """Policies of layers by pattern, and what they try."""

    kind: str
    rules: Mapping[str, nn.Policy | str]


def in_readout(lhs: str, rhs: str, cotangent: str) -> dict[str, nn.Policy | str]:
    """The readout alone in these formats."""
    matmul = MatmulConfig(lhs=lhs, rhs=rhs, cotangent=cotangent)
    return {"readout": nn.Policy(compute_dtype=WIDE, matmul=matmul, readout=matmul)}


_FROM_LOGITS = nn.Policy(compute_dtype=WIDE, loss=MatmulConfig(cotangent=E5M2))
LAYERS = ("query", "key", "value", "out", "up", "down")


def _everywhere(policy: nn.Policy | str) -> dict[str, nn.Policy | str]:
    return {f"*.{name}": policy for name in LAYERS}


VARIANTS: dict[str, Variant] = {
    "none": Variant("operand", {}),
    "activations": Variant("operand", _everywhere(in_formats(E4M3, WIDE, WIDE))),
    "weights": Variant("operand", _everywhere(in_formats(WIDE, E4M3, WIDE))),
    "cotangents": Variant("operand", _everywhere(in_formats(WIDE, WIDE, E4M3))),
    "cotangents in E5M2": Variant("operand", _everywhere(in_formats(WIDE, WIDE, E5M2))),
    "cotangents, dithered": Variant(
        "operand", _everywhere(in_formats(WIDE, WIDE, E4M3, dither=True))
    ),
    "cotangents in E5M2, dithered": Variant(
        "operand", _everywhere(in_formats(WIDE, WIDE, E5M2, dither=True))
    ),
    "all": Variant("operand", _everywhere("fp8")),
    "all, dynamic": Variant("scales", _everywhere("fp8_dynamic")),
    "all, blocks of 32": Variant("scales", _everywhere("mxfp8")),
    **{name: Variant("role", {f"*.{name}": "fp8"}) for name in LAYERS},
    "query and key": Variant("role", {"*.query": "fp8", "*.key": "fp8"}),
    "all but query and key": Variant("role", {f"*.{name}": "fp8" for name in LAYERS[2:]}),
    "readout": Variant("role", in_readout(E4M3, E4M3, E5M2)),
    "gradients of the readout": Variant("role", {"readout": _FROM_LOGITS}),
    "readout's activations": Variant("operand", in_readout(E4M3, WIDE, WIDE)),
    "readout's weights": Variant("operand", in_readout(WIDE, E4M3, WIDE)),
}


def main(
    overrides: Overrides = None,
    config: ConfigPath = None,
    data: DataPaths = None,
    batches: Annotated[
        int, typer.Option(min=1, help="validation batches of each run; gradients of two")
    ] = 32,
    seeds: Seeds = None,
    jobs: Jobs = 1,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints the rise of the loss and the error of gradients by what is in FP8."""
    entry = comparison("parity").only("--policies", "")
    told = Told(config, overrides, seeds, fresh, data, jobs)
    runs = [Trained.of(run, batches) for run in compare(entry, told).configs[REFERENCE]]
    values, errors = measured(runs)
    rows = [
        {"in FP8": row["variant"], "kind": VARIANTS[row["variant"]].kind, **row}
        | {"gradient error": float(np.mean(errors[row["variant"]]))}
        for row in judged(values, REFERENCE, {})
        if row["variant"] != REFERENCE
    ]
    for row in rows:
        del row["variant"]
    first = runs[0].config
    models = "one model" if len(runs) == 1 else f"{len(runs)} models"
    title = f"Rounding alone, {models} of {first.train.steps} steps"
    notes = [
        f"Evaluated and differentiated at the last parameters of the float32 runs, {batches} "
        "batches of validation text; what is not in FP8 is in bfloat16, the readout too unless it "
        "is named. Gradient error: norm of the difference over the norm, mean over kernels. "
        "Dithered: rounded up or down by their own bits, but for subnormal numbers of the format.",
    ]
    digest = digest_of([run.config for run in runs])
    publish("formats", [Table(title, rows, digest)], json, notes)


class Trained(NamedTuple):
    """A trained run: its config, its last parameters, other state, and batches."""

    config: Any
    params: nnx.State
    rest: nnx.State
    batches: list[Any]

    @classmethod
    def of(cls, config: RunConfig, batches: int) -> "Trained":
        state = last_state(config)
        data = recipe_of(config).load_data(config).validation()
        return cls(config, state.params, state.rest, list(islice(data, batches)))


def measured(runs: list[Trained]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Loss of each run, and mean relative error of its kernels' gradients, by variant."""
    values: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    exact: list[Any] = []
    for name in (REFERENCE, *VARIANTS):
        graphdef = structure(runs[0].config, name)
        evaluate, differentiate = make_evaluation(graphdef), jax.jit(gradient(graphdef))
        values[name] = [mean_loss(evaluate, r.params, r.rest, r.batches) for r in runs]
        found = [
            [differentiate(r.params, r.rest, batch, None)[1] for batch in r.batches[:2]]
            for r in runs
        ]
        if name == REFERENCE:
            exact = found
        else:
            errors[name] = [
                float(np.mean([error(*pair) for pair in zip(ours, theirs, strict=True)]))
                for ours, theirs in zip(found, exact, strict=True)
            ]
        jax.clear_caches()
    return values, errors


def structure(config: Any, name: str) -> nnx.GraphDef:
    """The model of a config with the products of a variant."""
    plain = config.model_copy(update={"policy": REFERENCE if name == REFERENCE else WIDE})
    model: Any = recipe_of(plain).build(plain)
    nn.set_policies(model, {} if name == REFERENCE else VARIANTS[name].rules)
    return nnx.split(model, nnx.Param, ...)[0]


def error(ours: Any, exact: Any) -> float:
    """Mean over kernels of the norm of a gradient's error over the gradient's."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True)
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return float(
        np.mean([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in wide if b.ndim > 1])
    )

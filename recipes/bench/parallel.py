"""What the exchange of gradients between devices sends, how it errs, and what training makes of it.

    python -m recipes bench parallel
    python -m recipes bench parallel --train --data TEXT
    python -m recipes bench parallel --steps

Devices are those of one process on a CPU; with too few, the command starts itself again with more.
Bytes are read from the compiled program. Training is data-parallel, `configs/gpt/parity.yaml` with
the batch divided over four devices, once for each format of the exchange (`mesh.gradients`), each
run in a process of its own. One that is complete in `train.runs_dir` is used as it is, and one that
was stopped is resumed. With `--steps` the same model's step is compiled over meshes that divide the
batch, parameters, sequences and matrices, and its collectives are counted.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import typer
from jax.sharding import Mesh, PartitionSpec

from unitscale.core import CastRounding, format_of
from unitscale.parallel import all_reduce, make_mesh

from ..config import RunConfig
from ..errors import RecipeError
from ..gpt.config import GPTConfig
from ..registry import CONFIGS, load_kind
from ..run.folder import dump_config
from ._compare import compare, comparison
from ._mesh_steps import mesh_steps
from ._runs import ConfigPath, DataPaths, Fresh, Overrides, Seeds, Told
from ._table import JsonPath, Table, publish, within
from .wire import bytes_on_wire

DEVICES, TRAIN_DEVICES = 8, 4
FORMATS = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2")
ROUNDINGS: tuple[CastRounding, ...] = ("nearest", "stochastic")
SHAPE = (512, 512)
MOST_ERROR = 0.04
SCALAR = 8.0  # bytes per tensor beside the data: an all-reduce of one 4-byte scale
_FLAG = "--xla_force_host_platform_device_count"


def main(
    overrides: Overrides = None,
    train: Annotated[bool, typer.Option(help="also train, for the validation loss")] = False,
    steps: Annotated[
        bool, typer.Option(help="also compile training steps over meshes, for what they send")
    ] = False,
    config: ConfigPath = None,
    data: DataPaths = None,
    seeds: Seeds = None,
    fresh: Fresh = False,
    json: JsonPath = None,
) -> None:
    """Prints bytes per gradient entry, the error of the mean, and validation loss by format."""
    if len(jax.devices()) < DEVICES:
        flags = [("--config", config), ("--seeds", seeds), ("--json", json)]
        flags += [("--data", text) for text in data or ()]
        given = [word for name, x in flags if x is not None for word in (name, str(x))]
        given += [
            flag for flag, x in (("--train", train), ("--steps", steps), ("--fresh", fresh)) if x
        ]
        _run_on(DEVICES, ["bench", "parallel", *(overrides or ()), *given])
        return
    tables = [exchange(SHAPE)]
    notes = [
        f"{DEVICES} devices, one gradient of {SHAPE[0]} x {SHAPE[1]}. Bytes that a device sends, "
        "by the convention of recipes.bench.wire.bytes_on_wire, from the compiled program. "
        "float32 is XLA's all-reduce; a CPU runs that of bfloat16 in float32, so here bfloat16 is "
        "exchanged as FP8 is.",
        "Error: that of the mean in norm, over the mean in float64. Heavy-tailed: magnitudes "
        "spread evenly over the binades from 2^-20 to 2^10; rounding to nearest and at random.",
    ]
    told = Told(config, overrides, seeds, fresh, data)
    if steps:
        own = ["policy=fp8", *told.words]
        tables.append(mesh_steps(load_kind(GPTConfig, config or CONFIGS / "gpt/parity.yaml", own)))
        notes.append(
            "Steps: compiled, not run. Collectives of the whole program, in float32 unless said; "
            "what stands in a loop is counted once."
        )
    if train:
        tables += compare(comparison("parallel"), told, run=_trained_apart).tables()
        notes.append(
            "Training: the batch divided, rounded to nearest; loss over all validation text."
        )
    publish("parallel", tables, json, notes)


def _trained_apart(config: RunConfig, fresh: bool) -> dict[str, float]:
    """Trains a run in a process of its own, which has as many devices as its mesh."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(dump_config(config), encoding="utf-8")
        _run_on(TRAIN_DEVICES, ["train", str(path), *(["--fresh"] if fresh else [])])
    return {}


def _run_on(devices: int, words: list[str]) -> None:
    """Runs a command of the recipes in a process of its own, on as many CPU devices as it needs."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    if any(flag.startswith(_FLAG) for flag in flags) and len(jax.devices()) < DEVICES:
        raise RecipeError(
            f"XLA_FLAGS: this benchmark needs {DEVICES} devices and JAX has {len(jax.devices())}; "
            f"set {_FLAG}={DEVICES} and JAX_PLATFORMS=cpu, or leave it out of XLA_FLAGS"
        )
    flags = [flag for flag in flags if not flag.startswith(_FLAG)]
    # Where devices are more than cores, programs in flight may wait for each other forever.
    more = {
        "XLA_FLAGS": " ".join([*flags, f"{_FLAG}={devices}"]),
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
    }
    command = [sys.executable, "-m", "recipes", *words]
    code = subprocess.run(command, env=os.environ | more, check=False).returncode
    if code:
        raise typer.Exit(code)


def gradients(kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """A gradient for each device: from N(0, 1), or heavy-tailed."""
    random = np.random.default_rng(0)
    shape = (DEVICES, *shape)
    if kind == "normal":
        return random.normal(size=shape).astype(np.float32)
    signs = random.choice([-1.0, 1.0], shape)
    return (signs * 2.0 ** random.uniform(-20, 10, shape)).astype(np.float32)


def _program(mesh: Mesh, dtype: str, rounding: CastRounding) -> Any:
    """The compiled mean over devices of one row for each."""

    def local(rows):
        return all_reduce(rows[0], "data", dtype, rounding=rounding, key=jax.random.key(0))

    each, whole = PartitionSpec("data"), PartitionSpec()
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=each, out_specs=whole))


def exchange(shape: tuple[int, ...]) -> Table:
    """Bytes and errors of the mean over devices, by format."""
    mesh = make_mesh({"data": DEVICES}, devices=jax.devices()[:DEVICES])
    samples = {kind: gradients(kind, shape) for kind in ("heavy-tailed", "normal")}
    entries = samples["normal"][0].size
    rows: list[dict[str, Any]] = []
    for dtype in FORMATS:
        row: dict[str, Any] = {"exchange": dtype}
        for rounding in ROUNDINGS:
            program = _program(mesh, dtype, rounding)
            compiled = program.lower(samples["normal"]).compile()
            row["bytes per entry"] = bytes_on_wire(compiled) / entries
            for kind, sample in samples.items():
                exact = sample.astype(np.float64).mean(0)
                error = np.linalg.norm(np.asarray(program(sample)) - exact)
                row[f"{kind} {rounding}"] = float(error / np.linalg.norm(exact))
        full = rows[0]["bytes per entry"] if rows else row["bytes per entry"]
        row["over float32"] = row["bytes per entry"] / full
        size = format_of(dtype).dtype
        if size is not None and size.itemsize < 4:
            share = size.itemsize / 4
            row["asked"] = f"{share:g} and a scalar"
            row["within"] = within(
                row["bytes per entry"] * entries, (None, full * share * entries + SCALAR)
            )
        if dtype == "float8_e4m3fn":
            row["asked"] += f"; heavy-tailed, nearest <= {MOST_ERROR:.0%}"
            row["within"] &= within(row["heavy-tailed nearest"], (None, MOST_ERROR))
        rows.append(row)
    return Table(f"Mean of gradients over {DEVICES} devices", rows)

"""What a training step would cost on an H200, projected from the program compiled for one.

    python -m recipes bench h200 --dump programs

Compiles the step of `recipes.train` for an H200, which needs the CUDA plugin for JAX and no GPU,
and projects its time kernel by kernel (`recipes.bench.aot`). Nothing is run: every time
is projected, of kernels that follow one another without gaps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from ..errors import RecipeError, refused
from ..registry import CONFIGS
from ._programs import (
    BEST,
    MORE,
    PEER,
    READOUT,
    REFERENCE,
    ROWS,
    SCALIFIED,
    SHAPES,
    UNSCALED,
    Program,
    chosen,
    config_of,
    for_h200,
    installed,
)
from ._table import JsonPath, Table, asked, publish
from .aot import h200_available

# What is asked of `fp8-scaled`, by shape.
MOST_TIME = {"gpt2-small": 0.65, "llama-1b": 0.62}
MOST_TEMPORARIES, MOST_OVER_PEER, MOST_OPTIMIZER_BYTES = 0.45, 0.70, 16.0
MOST_SCALIFIED = 1.05
NOTE = (
    "All times are projected: each kernel takes the longest of its bytes, of its operations and of "
    "what the smallest takes, without gaps or overlap. Attention by cuDNN, but not in rows of "
    "float16, whose products are float32 there. optimizer B/param: bytes that the update moves for "
    "each parameter. amax: reductions to the greatest magnitude, those of scaled optimizer state "
    "among them. arithmetic: element-wise kernels of many operations to a byte."
)


def main(
    shapes: Annotated[str, typer.Option(help="configs, separated by commas")] = ",".join(SHAPES),
    rows: Annotated[
        str,
        typer.Option(help=f"programs, separated by commas; also {', '.join(MORE)}"),
    ] = ",".join(ROWS),
    dump: Annotated[
        Path | None, typer.Option(help="keep each program's text as FOLDER/NAME.hlo")
    ] = None,
    top: Annotated[
        int, typer.Option(min=0, help="places listed of other kernels than products")
    ] = 12,
    json: JsonPath = None,
) -> None:
    """Prints projected times, memory and FP8 kernels of training steps, and what is asked."""
    wanted = chosen("--shapes", shapes, SHAPES)
    names, notes = installed(chosen("--rows", rows, {**ROWS, **MORE}))
    if not h200_available():
        raise RecipeError(
            "bench h200: expected the CUDA plugin for JAX, which compiles for an H200 without one; "
            "it is not installed; run pip install "
            f'"jax-cuda13-plugin=={jax.__version__}" "nvidia-cuda-nvcc==13.*" nvidia-nvvm'
        )
    if "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")  # the plugin would look for a driver
    tables = []
    for shape in wanted:
        found = compiled(shape, names, dump)
        tables += [times(shape, found), contents(shape, found), judged(shape, found)]
        if top and found:
            tables.append(places(shape, found, top))
    publish("h200", [table for table in tables if table.rows], json, [NOTE, *notes])


def compiled(shape: str, names: list[str], dump: Path | None) -> dict[str, Program]:
    """The programs of a shape. The first shape's texts lie in the folder, others in one below."""
    folder = dump if dump is None or shape == next(iter(SHAPES)) else dump / shape
    found = {}
    with refused(f"--dump: cannot write to {dump}", "give a folder that can be written"):
        for name in names:
            Console(stderr=True).print(f"compiling {shape}: {name}", markup=False, highlight=False)
            path = None if folder is None else folder / f"{name}.hlo"
            found[name] = for_h200(config_of(shape, name), path)
            jax.clear_caches()
    return found


def times(shape: str, found: Mapping[str, Program]) -> Table:
    """Projected times of each program."""
    data = config_of(shape, REFERENCE).data
    rows = []
    for name, program in found.items():
        row: dict[str, Any] = {"program": name, **program.times()}
        for other in (REFERENCE, PEER):
            if other in found:
                over = program.projection.seconds / found[other].projection.seconds
                row[f"time over {other}"] = over
        rows.append(row)
    tokens = f"{data.batch_size} x {data.sequence_length:,} tokens"
    return Table(f"Training step of {shape} on an H200, projected, {tokens}", rows)


def contents(shape: str, found: Mapping[str, Program]) -> Table:
    """What each program holds and moves."""
    rows = [{"program": name, **program.contents()} for name, program in found.items()]
    return Table(f"Memory and products of these programs, {shape}", rows)


def judged(shape: str, found: Mapping[str, Program]) -> Table:
    """What is asked of `fp8-scaled` and of scalify, and whether it is so."""
    rows: list[dict[str, Any]] = []

    def ask(figure: str, value: float, **bounds: Any) -> None:
        rows.append({"figure": figure, "value": value, **asked(value, **bounds)})

    if {UNSCALED, SCALIFIED} <= {*found}:
        over = found[SCALIFIED].projection.seconds / found[UNSCALED].projection.seconds
        ask(f"projected step of {SCALIFIED} over {UNSCALED}", over, most=MOST_SCALIFIED)
    title = f"What is asked of {BEST if BEST in found else SCALIFIED}, {shape}"
    if BEST not in found:
        return Table(title, rows)
    best = found[BEST]
    if reference := found.get(REFERENCE):
        over = best.projection.seconds / reference.projection.seconds
        ask(f"projected step over {REFERENCE}", over, most=MOST_TIME[shape])
        temporaries = best.temporaries / reference.temporaries
        ask(f"temporaries over {REFERENCE}", temporaries, most=MOST_TEMPORARIES)
    if peer := found.get(PEER):
        over = best.projection.seconds / peer.projection.seconds
        ask(f"projected step over {PEER}", over, most=MOST_OVER_PEER)
    columns = best.contents()
    ask("optimizer, bytes a parameter", columns["optimizer B/param"], most=MOST_OPTIMIZER_BYTES)
    ask("FP8 share of the operations of Dense", columns["FP8 of Dense"], least=1.0)
    if readout := found.get(READOUT):
        share = readout.contents()["FP8 of readout"]
        ask(f"FP8 share of the operations of the readout, {READOUT}", share, least=1.0)
    if unit := found.get("fp8"):  # scaled state has reductions of its own
        ask("amax reductions of fp8", unit.contents()["amax"], most=0)
    return Table(title, rows)


def places(shape: str, found: Mapping[str, Program], top: int) -> Table:
    """Where the kernels of the last program come from that are no products and no attention."""
    name, program = list(found.items())[-1]
    rows = [
        {
            "projected ms": 1e3 * total.seconds,
            "MiB": total.bytes / 2**20,
            "kernels": total.kernels,
            "kernels from": total.label.replace(f"{CONFIGS.parent}/", ""),
        }
        for total in program.projection.by_place()[:top]
    ]
    return Table(f"Memory- and arithmetic-bound kernels of {name}, {shape}, projected", rows)

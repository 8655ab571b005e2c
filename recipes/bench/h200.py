"""What a training step would cost on an H200, projected from the program compiled for one.

    JAX_PLATFORMS=cpu python -m recipes bench h200 --dump programs
    JAX_PLATFORMS=cpu python -m recipes bench h200 --shapes gpt2-small model.layers=2

Compiles the steps of `bench step` for an H200, which needs the CUDA plugin for JAX and no GPU, and
projects their time kernel by kernel (`recipes.bench.aot`). Nothing is run. Overrides hold for every
row.
"""

from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich.console import Console

from unitscale.quant import check_fp8

from ..errors import RecipeError, refused
from ..registry import CONFIGS
from ..run.step import abstract_step
from . import runs
from .aot import Roofline, compile_h200, h200_topology, roofline
from .step import MORE, REFERENCE, ROWS, SHAPES, config_of, fused_attention, peak_bytes

DEFAULT = "gpt2-small,llama-1b"
KINDS = ("FP8 products", "16-bit products", "32-bit products", "attention", "memory-bound")
NOTES = (
    "All times are projected: each kernel takes the longest of its bytes, of its operations and of "
    "what the smallest takes, without gaps or overlap. All attention is cuDNN's kernel.",
    "over plain: projected time over plain flax.nnx in bfloat16. peak MiB: arguments, results and "
    "temporaries. FP8 matmuls: of all matmuls but attention's, those that are FP8 kernels.",
)


def main(
    overrides: runs.Overrides = None,
    shapes: Annotated[
        str, typer.Option(help=f"separated by commas: {', '.join(SHAPES)}")
    ] = DEFAULT,
    rows: Annotated[
        str, typer.Option(help=f"programs, separated by commas; also {', '.join(MORE)}")
    ] = ",".join(ROWS),
    dump: Annotated[
        Path | None, typer.Option(help="keep each program's text as FOLDER/SHAPE-NAME.hlo")
    ] = None,
    top: Annotated[
        int, typer.Option(min=0, help="places listed of the last program's element-wise kernels")
    ] = 0,
    json: runs.JsonPath = None,
) -> None:
    """Prints projected times, memory, kernels and FP8 matmuls of training steps on an H200."""
    wanted = runs.chosen("--shapes", shapes, SHAPES)
    names = runs.chosen("--rows", rows, ROWS | MORE)
    jax.config.update("jax_platforms", "cpu")  # the plugin would look for a driver
    try:
        h200_topology()
    except ImportError as error:
        raise RecipeError(str(error)) from error
    tables = []
    for shape in wanted:
        found: list[dict[str, Any]] = []
        report = Roofline(())
        for name in names:
            Console(stderr=True).print(f"compiling {shape}: {name}", markup=False, highlight=False)
            compiled = compiled_step(shape, name, overrides or [])
            if dump is not None:
                with refused(f"--dump: cannot write to {dump}", "give another folder"):
                    dump.mkdir(parents=True, exist_ok=True)
                    (dump / f"{shape}-{name}.hlo").write_text(compiled.as_text() or "", "utf-8")
            report = roofline(compiled)
            found.append({"program": name, **described(compiled, report)})
            jax.clear_caches()
        plain = [row["projected ms"] for row in found if row["program"] == REFERENCE]
        for row in found if plain else ():
            row["over plain"] = row["projected ms"] / plain[0]
        data = config_of(shape, names[0], overrides or []).data
        tokens = f"{data.batch_size} x {data.sequence_length:,} tokens"
        tables.append(
            runs.Table(f"Training step of {shape} on an H200, projected, {tokens}", found)
        )
        if top:
            tables.append(runs.Table(f"Element-wise kernels of {names[-1]}", places(report, top)))
    runs.publish("h200", tables, json, NOTES)


def compiled_step(shape: str, row: str, overrides: list[str]) -> jax.stages.Compiled:
    """The step of a row, compiled for an H200."""
    _, step, arguments = abstract_step(config_of(shape, row, overrides))
    with fused_attention():
        return compile_h200(step, *arguments)


def described(compiled: jax.stages.Compiled, report: Roofline) -> dict[str, Any]:
    """Columns of a table about a compiled program and its projection."""
    fp8, memory = check_fp8(compiled), compiled.memory_analysis()
    ms = {total.label: 1e3 * total.seconds for total in report.by_kind()}
    matmuls = f"{len(fp8.fp8)} of {len(fp8.matmuls)}"
    row: dict[str, Any] = {"projected ms": 1e3 * report.seconds, "over plain": None}
    row |= {"peak MiB": peak_bytes(compiled) / 2**20}
    row |= {"temporaries MiB": getattr(memory, "temp_size_in_bytes", 0) / 2**20}
    row |= {"uncounted loops": report.uncounted} if report.uncounted else {}
    row |= {"kernels": len(report.kernels), "FP8 matmuls": matmuls, "amax": fp8.amax_reductions}
    return row | {f"{kind} ms": ms.get(kind, 0.0) for kind in KINDS}


def places(report: Roofline, top: int) -> list[dict[str, Any]]:
    """Where the kernels come from that are no matmuls and no attention, the longest first."""
    return [
        {
            "projected ms": 1e3 * total.seconds,
            "MiB": total.bytes / 2**20,
            "kernels": total.kernels,
            "from": total.label.replace(f"{CONFIGS.parent}/", ""),
        }
        for total in report.by_place()[:top]
    ]

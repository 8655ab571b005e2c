"""Measure the exchange of gradients in narrow formats: bytes, error of the mean, validation loss.

    python -m recipes bench parallel
    python -m recipes bench parallel --train --data TEXT --seeds 5
    python -m recipes bench parallel --steps
    python -m recipes bench parallel --wire

Runs on eight CPU devices of one process, and reads bytes from compiled programs. `--train` trains
`configs/gpt/parity.yaml`, data parallel, for each format of `precision.exchange`. `--steps` counts
the collectives of the same model's step on several meshes, compiled for H200s if the CUDA plugin is
installed. `--wire` compares the bytes that steps of an 8B model send over `mesh: {fsdp: 8}`.
"""

from collections import Counter, defaultdict
from contextlib import suppress
from typing import Annotated, Any

import jax
import numpy as np
import typer
from jax.sharding import NamedSharding, PartitionSpec

from unitscale.core import CastRounding
from unitscale.parallel import all_reduce, batch_axes, make_mesh, param_shardings

from ..config import RunConfig
from ..errors import RecipeError
from ..gpt.config import GPTConfig
from ..registry import CONFIGS, load_config, load_kind
from ..run.processes import on_mesh
from ..run.step import abstract_step
from . import runs
from .aot import compile_h200, h200_available, h200_topology
from .step import REFERENCE, ROWS
from .wire import bytes_on_wire, collectives

DEVICES = 8
FORMATS = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2")
ROUNDINGS: tuple[CastRounding, ...] = ("nearest", "stochastic")
SHAPE = (512, 512)
VARIANTS = {
    f"exchange-{dtype}": (f"mesh.data={DEVICES}", f"precision.exchange={dtype}")
    for dtype in ("float32", "float8_e4m3fn")
}
MESHES = ({"data": 8}, {"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"fsdp": 4, "context": 2})
MESHES = (*MESHES, {"context": 8}, {"fsdp": 2, "context": 2, "tensor": 2})
# The shape of Llama 3 8B, from that of Llama 2 7B; steps of 8 x 4,096 tokens.
LLAMA = ("model.kv_heads=8", "model.mlp_ratio=3.5", "model.vocab=128256", "data.batch_size=8")
LAYERS, MOST_SENT = 32, 0.55
_EXCHANGED = {dtype: f"precision.exchange={dtype}" for dtype in ("float8_e4m3fn", "bfloat16")}
SENT = {
    REFERENCE: ROWS[REFERENCE],
    "fp8-scaled": (*ROWS["fp8-scaled"], _EXCHANGED["float8_e4m3fn"]),
    "fp8-scaled, gradients in bfloat16": (*ROWS["fp8-scaled"], _EXCHANGED["bfloat16"]),
    "fp8-scaled, no exchange": ROWS["fp8-scaled"],
}


def main(
    overrides: runs.Overrides = None,
    train: Annotated[bool, typer.Option("--train", help="train, for the validation loss")] = False,
    steps: Annotated[bool, typer.Option("--steps", help="compile steps over meshes")] = False,
    wire: Annotated[bool, typer.Option("--wire", help="only compile steps of an 8B model")] = False,
    config: runs.ConfigPath = None,
    data: runs.DataPaths = None,
    seeds: runs.Seeds = 1,
    fresh: runs.Fresh = False,
    json: runs.JsonPath = None,
) -> None:
    """Print bytes per gradient entry, the error of the mean, and validation loss by format."""
    with suppress(RuntimeError):  # JAX is initialized already
        jax.config.update("jax_num_cpu_devices", DEVICES)
    # With more devices than cores, concurrent programs can deadlock.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if len(jax.devices()) != DEVICES:
        flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={DEVICES}"
        raise RecipeError(f"bench parallel needs {DEVICES} devices: set JAX_PLATFORMS=cpu {flag}")
    if wire:
        tables = [wire_steps([*(overrides or []), *more]) for more in ([], ["model.remat=layer"])]
        note = f"Bytes of programs with 1 and 2 layers, extrapolated linearly to {LAYERS}."
        return runs.publish("parallel-wire", tables, json, [note])
    tables = [runs.Table(f"Mean of gradients of {SHAPE} over {DEVICES} devices", exchange())]
    if steps:
        base = config or str(CONFIGS / runs.PARITY)
        tables.append(mesh_steps(load_config(base, ["precision.policy=fp8", *(overrides or [])])))
    if train:
        told = runs.Told(config, overrides, seeds, fresh, data)
        found = runs.compare(VARIANTS, told)
        tables += found.tables("Validation loss", {"exchange-float8_e4m3fn": 0.003})
    note = "Bytes: sent by each device of a ring. Error: relative error of the mean, in norm."
    more = "Heavy-tailed: the logarithms of magnitudes are uniform, from 2^-20 to 2^10."
    runs.publish("parallel", tables, json, [note, more])


def exchange() -> list[dict[str, Any]]:
    """Measure bytes and errors of the mean over devices, by format."""
    mesh = make_mesh({"data": DEVICES})
    random = np.random.default_rng(0)
    signs, powers = random.choice([-1.0, 1.0], (DEVICES, *SHAPE)), (DEVICES, *SHAPE)
    samples = {
        "heavy-tailed": np.float32(signs * 2.0 ** random.uniform(-20, 10, powers)),
        "normal": random.normal(size=powers).astype(np.float32),
    }
    rows: list[dict[str, Any]] = []
    for dtype in FORMATS:
        row: dict[str, Any] = {"exchange": dtype}
        for rounding in ROUNDINGS:

            def local(rows: Any, dtype: str = dtype, rounding: CastRounding = rounding) -> Any:
                key = jax.random.key(0)
                return all_reduce(rows[0], "data", dtype, rounding=rounding, key=key)

            each, whole = PartitionSpec("data"), PartitionSpec()
            program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=each, out_specs=whole))
            size = bytes_on_wire(program.lower(samples["normal"]).compile())
            row["bytes per entry"] = size / samples["normal"][0].size
            for kind, sample in samples.items():
                exact = sample.astype(np.float64).mean(0)
                error = np.linalg.norm(np.asarray(program(sample)) - exact)
                row[f"{kind} {rounding}"] = float(error / np.linalg.norm(exact))
        rows.append(row)
        row["over float32"] = row["bytes per entry"] / rows[0]["bytes per entry"]
    return rows


def mesh_steps(config: RunConfig) -> runs.Table:
    """Count collectives and memory of a config's step per device, by mesh."""
    kind, devices = _devices()
    rows = []
    for axes in MESHES:
        program = _compiled(config, axes, devices)
        found = collectives(program)
        counts = Counter(collective.kind for collective in found)
        sent = sum(collective.sent for collective in found)
        narrow = sum(c.sent for c in found if c.dtype.startswith(("u8", "s8", "f8")))
        memory: Any = program.memory_analysis()
        row = {"mesh": ", ".join(f"{name} {size}" for name, size in axes.items())}
        row |= {"MiB sent": sent / 2**20, "of it in 8 bits": narrow / max(sent, 1.0)}
        row |= {"temporaries MiB": memory.temp_size_in_bytes / 2**20}
        row |= {"arguments MiB": memory.argument_size_in_bytes / 2**20}
        rows.append(row | dict(sorted(counts.items())))
    return runs.Table(f"A training step on {DEVICES} devices ({kind}), per device", rows)


def wire_steps(overrides: list[str]) -> runs.Table:
    """Count the bytes that a device sends in steps of an 8B model, by kind of collective."""
    (kind, devices), rows = _devices(), []
    for program, own in SENT.items():
        sent: list[dict[str, float]] = []
        for layers in (1, 2):
            words = [*LLAMA, f"mesh.fsdp={DEVICES}", *own, *overrides, f"model.layers={layers}"]
            config = load_kind(GPTConfig, CONFIGS / "gpt" / "llama-7b.yaml", words)
            sent.append(defaultdict(float))
            for collective in collectives(_compiled(config, {"fsdp": DEVICES}, devices)):
                sent[-1][collective.kind] += collective.sent / 2**20
            jax.clear_caches()
        one, two = sent
        total = {name: one[name] + (LAYERS - 1) * (two[name] - one[name]) for name in sorted(two)}
        row = {"program": program, "MiB sent": sum(total.values()), "over plain": 1.0}
        if rows:
            row["over plain"] = row["MiB sent"] / rows[0]["MiB sent"]
        within = runs.asked(row["over plain"], MOST_SENT) if program == "fp8-scaled" else {}
        rows.append(row | {f"{name} MiB": size for name, size in total.items()} | within)
    title = f"A step of an 8B model over {DEVICES} devices ({kind}), bytes that each sends"
    return runs.Table(f"{title}{''.join(f', {word}' for word in overrides)}", rows)


def _devices() -> tuple[str, Any]:
    if h200_available():
        return "H200", h200_topology(DEVICES).devices
    return "CPU", jax.devices()


def _compiled(config: RunConfig, axes: dict[str, int], devices: Any) -> jax.stages.Compiled:
    mesh = make_mesh(axes, devices=devices)
    _, step, (state, batch, index) = abstract_step(config)

    def placed(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    rows = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
    arguments = (
        jax.tree.map(placed, state, param_shardings(state, mesh)),
        jax.tree.map(lambda x: placed(x, rows), batch),
        placed(index, NamedSharding(mesh, PartitionSpec())),
    )
    divided = on_mesh(step, state, mesh)
    if devices[0].platform != "cpu":
        return compile_h200(divided, *arguments)
    return divided.lower(*arguments).compile()

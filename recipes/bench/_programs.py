"""Training steps by row and shape, as `bench h200` and `bench gpu` look at them.

A row is a library, a policy and the formats of the optimizer state; a shape is a config with its
batch. What is compiled is the step of `recipes.train`, unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from unitscale.core import is_scaled
from unitscale.quant import Fp8Report, check_fp8

from ..errors import RecipeError
from ..gpt.config import GPTConfig
from ..registry import CONFIGS, load_kind
from ..run.step import OPTIMIZER, abstract_step
from .aot import Kernel, Roofline, compile_h200, roofline
from .quant import MISSING, has_qwix, is_dense, is_readout

FLOAT32_STATE = ("optimizer.weights=null", "optimizer.moments=null", "optimizer.rounding=nearest")
# The defaults of `optim.scaled`.
SCALED_STATE = (
    "optimizer.weights=float16",
    "optimizer.moments=[float8_e4m3fn,float16]",
    "optimizer.rounding=nearest",
    "optimizer.min_size=4096",
)
# No u-muP, so a rate of its own.
_PLAIN = (
    "model.library=plain",
    "optimizer.umup=false",
    "optimizer.learning_rate=0.001",
    *FLOAT32_STATE,
)
PLAIN = ("policy=bfloat16", *_PLAIN)
# A vocabulary in the size that kernels like, which plain models have no key for.
PADDED = ("model.vocab_multiple=128",)
REFERENCE, PEER, BEST, READOUT = "plain-bfloat16", "qwix", "fp8-scaled", "fp8-readout"
READOUT_SCALED, READOUT_GRADIENTS = "fp8-readout-scaled", "fp8-readout-gradients-scaled"
ROWS = {
    REFERENCE: PLAIN,
    PEER: (*PLAIN, "model.products=qwix"),
    "bfloat16": ("policy=bfloat16", *PADDED, *FLOAT32_STATE),
    "fp8": ("policy=fp8", *PADDED, *FLOAT32_STATE),
    READOUT: ("policy=fp8", "fp8_readout=true", *PADDED, *FLOAT32_STATE),
    BEST: ("policy=fp8", *PADDED, *SCALED_STATE),
    READOUT_GRADIENTS: ("policy=fp8", "fp8_readout=gradients", *PADDED, *SCALED_STATE),
    READOUT_SCALED: ("policy=fp8", "fp8_readout=true", *PADDED, *SCALED_STATE),
}
"""Overrides of each row."""

CONVERTED, SCANNED = "converted", "fp8-scaled-scan"
UNSCALED, SCALIFIED, DECOUPLED = "plain-float16", "scalify-float16", "decoupled-float16"
_SCALIFIED = ("policy=float32", "scalify.storage=float16", *_PLAIN)
MORE = {
    CONVERTED: (*PLAIN, "model.products=fp8_dynamic"),
    SCANNED: ("model.scan=true", *ROWS[BEST]),
    UNSCALED: ("policy=float16", *_PLAIN),
    SCALIFIED: _SCALIFIED,
    DECOUPLED: ("scalify.decouple=true", *_SCALIFIED),
}
"""Rows only where they are asked for: `nn.convert`, layers in a loop, scalify."""

SHAPES = {
    "gpt2-small": ("model.vocab=50257", "model.tied_readout=true", "data.batch_size=8"),
    "llama-1b": ("data.batch_size=4",),
}
"""Overrides of each config of `configs/gpt/`."""
TOY = (
    "model.width=64",
    "model.heads=4",
    "model.layers=1",
    "model.vocab=256",
    "data.tokenizer.kind=byte",
    "data.tokenizer.vocab=null",
    "data.sequence_length=32",
    "data.batch_size=2",
)
"""Overrides that make a shape small enough for a test."""


def chosen(option: str, names: str, known: Any) -> list[str]:
    """The names that an option of the command line lists, in the order of those known."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise RecipeError(
            f"{option}: expected some of {', '.join(known)}; got {', '.join(unknown)}; correct the "
            "list"
        )
    return [name for name in known if name in wanted]


def installed(rows: list[str]) -> tuple[list[str], list[str]]:
    """Those rows whose libraries are here, and a note about the others."""
    if PEER not in rows or has_qwix():
        return rows, []
    return [row for row in rows if row != PEER], [f"Row {PEER}: {MISSING}"]


def config_of(shape: str, row: str, *, toy: bool = False) -> GPTConfig:
    """The run whose step is looked at."""
    words = [*SHAPES[shape], *(TOY if toy else ()), *{**ROWS, **MORE}[row]]
    return load_kind(GPTConfig, CONFIGS / "gpt" / f"{shape}.yaml", words)


@contextmanager
def fused_attention() -> Iterator[None]:
    """Within the block, 16-bit attention of `jax.nn` is traced for cuDNN's kernel.

    That is the attention of plain models, which do not take the kernel by themselves.
    """
    own = jax.nn.dot_product_attention

    @functools.wraps(own)
    def attend(query, key, value, *args, implementation=None, **options):
        if implementation is None and query.dtype in (jnp.float16, jnp.bfloat16):
            implementation = "cudnn"
        return own(query, key, value, *args, implementation=implementation, **options)

    with mock.patch.object(jax.nn, "dot_product_attention", attend):
        yield


class Program(NamedTuple):
    """A compiled step: its text, what is projected of it, and what it is made of."""

    text: str
    projection: Roofline
    fp8: Fp8Report | None  # None: compiled for no GPU
    temporaries: int
    parameters: int
    vocab: int

    def times(self) -> dict[str, float]:
        """Columns of a table; every time is projected."""
        ms = {total.label: 1e3 * total.seconds for total in self.projection.by_kind()}
        return {
            "projected ms": 1e3 * self.projection.seconds,
            "16-bit ms": ms.get("16-bit products", 0.0),
            "FP8 ms": ms.get("FP8 products", 0.0),
            "attention ms": ms.get("attention", 0.0),
            "memory-bound ms": ms.get("memory-bound", 0.0),
            "arithmetic ms": ms.get("arithmetic-bound", 0.0),
        }

    def contents(self) -> dict[str, Any]:
        """Columns of a table: memory, bytes and kinds of products."""
        row: dict[str, Any] = {
            "temporaries MiB": self.temporaries / 2**20,
            "projected optimizer ms": 1e3 * sum(k.seconds for k in self._optimizer),
            "optimizer B/param": self.optimizer_bytes,
        }
        if self.fp8 is not None:
            row["FP8 of Dense"] = self.share(is_dense)
            row["FP8 of readout"] = self.share(is_readout)
            row["amax"] = self.fp8.amax_reductions
        return row

    @property
    def optimizer_bytes(self) -> float:
        """Bytes a parameter that kernels of the update move; the gradient's norm is none."""
        return sum(k.bytes for k in self._optimizer) / self.parameters

    @property
    def _optimizer(self) -> list[Kernel]:
        return [k for k in self.projection.kernels if f"/{OPTIMIZER}/" in k.op_name]

    def share(self, which: Any) -> float:
        """Share of the operations of some products that FP8 kernels do."""
        report = self.fp8
        found = [m for m in report.matmuls if which(m, self.vocab)] if report else []
        whole = sum(m.flops for m in found)
        return sum(m.flops for m in found if m.fp8) / whole if whole else 0.0


def program_of(
    config: GPTConfig, compiled: jax.stages.Compiled, state: Any, *, gpu: bool = True
) -> Program:
    """What there is to say of a compiled step, whose state has these parameters."""
    analysis: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    return Program(
        text,
        roofline(text),
        check_fp8(compiled) if gpu else None,
        analysis.temp_size_in_bytes,
        sum(leaf.size for leaf in jax.tree.leaves(state.params, is_leaf=is_scaled)),
        config.model.vocab,
    )


def for_h200(config: GPTConfig, dump: Path | None = None) -> Program:
    """Compiles the step of a config for an H200, and keeps its text in a file."""
    _, step, (state, *rest) = abstract_step(config)
    with fused_attention():
        compiled = compile_h200(step, state, *rest)
    program = program_of(config, compiled, state)
    if dump is not None:
        dump.parent.mkdir(parents=True, exist_ok=True)
        dump.write_text(program.text, encoding="utf-8")
    return program

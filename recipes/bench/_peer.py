"""Training steps of PyTorch's unit-scaling, in an interpreter of its own, in turns with ours."""

import os
import statistics
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from flax import nnx

from ..errors import RecipeError
from ..gpt.config import GPTConfig
from ..run.recipe import build_model
from ._table import Table, asked
from ._timing import interleaved, random_batch, ratio, stepper

SCRIPT = Path(__file__).with_name("_peer_step.py")
MOST = 0.90


class Peer:
    """A process that trains a step for each line that it is given.

    Args:
        command: what starts it; it then says how many parameters it has, and two versions.

    Raises:
        RecipeError: if it ends before it is ready, or between steps.
    """

    def __init__(self, command: Sequence[str]):
        self.process = subprocess.Popen(
            [*command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        parameters, *versions = self._line().split()
        self.parameters, self.versions = int(parameters), versions

    def step(self) -> float:
        """Trains one step, and returns the seconds that it took by its own clock."""
        with suppress(BrokenPipeError):  # that it ended is seen below
            print(file=self.process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        out: Any = self.process.stdout
        if line := out.readline():
            return line
        code = self._close()
        raise RecipeError(
            "--peer: expected an interpreter that has torch and unit-scaling 0.3.5; its step ended "
            f"with exit code {code}, see above; run pip install torch unit-scaling for it"
        )

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> int:
        for stream in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):  # a line that nobody read
                if stream is not None:
                    stream.close()
        return self.process.wait()


def beside_peer(python: str, config: GPTConfig, rounds: int) -> Table:
    """Training steps of a config over those of the peer's decoder of the same shape."""
    model, data, threads = config.model, config.data, os.cpu_count() or 1
    sizes = [model.width, model.layers, model.heads, model.vocab, data.batch_size]
    words = [*map(str, [*sizes, data.sequence_length, threads])]
    shapes = nnx.state(nnx.eval_shape(lambda: build_model(config)), nnx.Param)
    parameters = sum(x.size for x in jax.tree.leaves(shapes))
    own = stepper(config, random_batch(config))
    rows = []
    for mode in ("compiled", "eager"):
        with Peer([python, str(SCRIPT), *words, mode]) as peer:
            times = interleaved(own, peer.step, rounds)
        ours, theirs = (each.elapsed for each in times)
        library, torch = peer.versions
        found = ratio(ours, theirs)
        rows.append(
            {
                "step": f"unit-scaling {library}, torch {torch}, {mode}",
                "parameters": peer.parameters,
                "ours": parameters,
                "unitscale ms": 1e3 * statistics.median(ours),
                "peer ms": 1e3 * statistics.median(theirs),
                **found,
                **(asked(found["ratio"], most=MOST) if mode == "compiled" else {}),
            }
        )
    title = (
        f"Time of a training step in float32 over PyTorch's unit-scaling, {model.width} wide, "
        f"{model.layers} layers, {data.batch_size} x {data.sequence_length} tokens, "
        f"{threads} threads each"
    )
    return Table(title, rows)

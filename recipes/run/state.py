"""The state of training: created, restored from checkpoints, loaded for use."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from unitscale.optim import ScaledTransformation
from unitscale.parallel import AutoScale

from ..config import TOKENIZER_FILE, DataConfig, RunConfig, SequenceConfig, TokenizerConfig
from ..errors import RecipeError
from .checkpoint import Checkpoints, Restored
from .convert import convert, formats, with_formats
from .folder import existing_run, is_sweep, run_folder, written_config
from .optimizer import make_optimizer
from .precision import scaled
from .processes import place
from .recipe import build_model

Run = TypeVar("Run", bound=RunConfig)


class Skips(NamedTuple):
    """Steps left out, as their loss or gradient was not finite: in all, and since a good one."""

    total: jax.Array
    in_a_row: jax.Array


class LossScale(NamedTuple):
    """A loss scale that follows the gradients, for comparison: unit scaling does without.

    A step whose gradient is not finite is left out and halves the scale; 2000 others in a row
    double it.

    References:
      Micikevicius et al., "Mixed Precision Training", 2018, arXiv 1710.03740, section 3.2.
    """

    value: jax.Array
    good: jax.Array  # finite steps since it last changed

    @classmethod
    def create(cls) -> Self:
        """The scale before the first step, as PyTorch's GradScaler has it."""
        return cls(jnp.float32(2.0**16), jnp.int32(0))

    def after(self, finite: jax.Array) -> Self:
        """The scale for the next step."""
        doubles = self.good + 1 >= 2000
        grown = jnp.where(doubles, 2 * self.value, self.value)
        value = jnp.where(finite, grown, self.value / 2)
        return self._replace(value=value, good=jnp.where(finite & ~doubles, self.good + 1, 0))


class TrainState(NamedTuple):
    """All that a step changes: parameters, other model state (PRNG), optimizer, steps done."""

    params: nnx.State
    rest: nnx.State
    opt_state: optax.OptState
    step: jax.Array
    auto: AutoScale | None = None  # of gradients that are exchanged in FP8
    skips: Skips | None = None  # where steps may be left out
    loss_scale: LossScale | None = None  # of one that follows the gradients


def init_state(
    config: RunConfig,
) -> tuple[nnx.GraphDef, optax.GradientTransformation, TrainState]:
    """The model's structure, its optimizer, and the state before the first step."""
    graphdef, params, rest = nnx.split(build_model(config), nnx.Param, ...)
    optimizer = make_optimizer(config, params)
    if isinstance(optimizer, ScaledTransformation):
        params = optimizer.scale_params(params)
    none = jnp.zeros((), jnp.int32)
    skips = Skips(none, none.copy()) if config.optimizer.skip_nonfinite else None
    precision = config.precision
    narrow = (precision.exchange or "").startswith("float8")
    auto = AutoScale.create(params) if narrow else None
    loss_scale = LossScale.create() if precision.loss_scale == "dynamic" else None
    opt_state = optimizer.init(params)
    state = TrainState(params, rest, opt_state, none.copy(), auto, skips, loss_scale)
    return graphdef, optimizer, scaled(precision, state)


def restore(
    config: RunConfig,
    checkpoints: Checkpoints,
    state: TrainState,
    mesh: Mesh | None,
    say: Callable[[str], None],
) -> Restored | None:
    """The newest whole checkpoint of a run, in the formats and over the mesh of its config."""

    def written(facts: dict[str, Any]) -> RunConfig | None:
        """The config in the formats of a checkpoint, where they are others."""
        config_then = with_formats(config, facts)
        return None if formats(config_then) == formats(config) else config_then

    def like(facts: dict[str, Any]) -> TrainState:
        other = written(facts)
        return state if other is None else place(init_state(other)[2], mesh)

    restored = checkpoints.restore(like, say)
    if restored is None or (other := written(restored.facts)) is None:
        return restored
    say(f"the checkpoint of step {restored.step} has other formats than the run; converting it")
    _, optimizer, first = init_state(config)
    converted = convert(restored.state, other, config, optimizer, first)
    return restored._replace(state=place(converted, mesh))


def with_run_tokenizer(config: Run) -> Run:
    """A config with the tokenizer that its run was trained with, whatever its own says."""
    folder = existing_run(config)
    trained = written_config(folder, type(config))
    if not isinstance(config.data, DataConfig) or not isinstance(trained.data, DataConfig):
        return config
    is_byte = trained.data.tokenizer.kind == "byte"
    return _with_tokenizer(config, None if is_byte else folder / TOKENIZER_FILE)


def with_kept_tokenizer(config: Run) -> Run:
    """A config with the tokenizer that an earlier start of its run left, if one did.

    One that is trained on the text again may differ, even where the text does not.
    """
    data, file = config.data, run_folder(config) / TOKENIZER_FILE
    if not isinstance(data, DataConfig) or data.tokenizer.kind == "byte" or not file.exists():
        return config
    return _with_tokenizer(config, file)


def _with_tokenizer(config: Run, file: Path | None) -> Run:
    tokenizer = TokenizerConfig() if file is None else TokenizerConfig(kind="file", path=str(file))
    data = config.data.model_copy(update={"tokenizer": tokenizer})
    return config.model_copy(update={"data": data})


def load_trained(config: RunConfig, say: Callable[[str], None]) -> tuple[nnx.GraphDef, TrainState]:
    """The model of a run, from its newest whole checkpoint; nothing on disk is changed."""
    graphdef, restored = load_checkpoint(config, say)
    return graphdef, restored.state


def load_checkpoint(config: RunConfig, say: Callable[[str], None]) -> tuple[nnx.GraphDef, Restored]:
    """As `load_trained`, with the facts of the checkpoint."""
    folder = existing_run(config)
    trained = written_config(folder, type(config)).resumed
    longest, data = trained.longest, config.data
    if longest is not None and isinstance(data, SequenceConfig) and data.sequence_length > longest:
        raise RecipeError(
            f"data.sequence_length: the run in {folder} learned {longest} positions; got "
            f"{data.sequence_length}; use at most {longest}"
        )
    graphdef, _, state = init_state(trained)
    checkpoints = Checkpoints(folder, read_only=True)
    try:
        restored = restore(trained, checkpoints, state, None, say)
    finally:
        checkpoints.close()
    if restored is None:
        todo = "train it first"
        if is_sweep(folder):
            todo = "it is a sweep, which keeps losses alone: train one of its points"
        raise RecipeError(f"name: the run in {folder} has no checkpoint; {todo}")
    return graphdef, restored

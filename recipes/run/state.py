"""The state of training and its optimizer: created, restored from checkpoints, loaded for use."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from unitscale import optim, to_array
from unitscale.core import is_scaled
from unitscale.nn import set_policies
from unitscale.parallel import AutoScale

from ..config import (
    TOKENIZER_FILE,
    DataConfig,
    OptimizerConfig,
    RunConfig,
    SequenceConfig,
    TokenizerConfig,
)
from ..errors import RecipeError
from ..recipe import recipe_of
from .checkpoint import Checkpoints, Restored
from .folder import existing_run, run_folder, written_config
from .precision import convert, formats, scaled, with_formats
from .processes import place

Run = TypeVar("Run", bound=RunConfig)

# Hidden kernels then do best at about the learning rate that is best for Adam, which moves the
# other roles. Plain models have about 0.02 of the weights' own spectral norm.
_MUON_RMS = 2.0**-5


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up from 0, then down to `final_fraction`."""
    peak, warmup = config.learning_rate, config.warmup_steps
    last = peak * config.final_fraction
    falling = {
        "cosine": optax.cosine_decay_schedule(peak, steps - warmup, config.final_fraction),
        "linear": optax.linear_schedule(peak, last, steps - warmup),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    if not warmup:
        return falling
    rising = optax.linear_schedule(0.0, peak, warmup)
    return optax.join_schedules([rising, falling], [warmup])


def updates_done(opt_state: optax.OptState) -> jax.Array:
    """Updates so far, as the schedule counts them: a step that was left out is none."""

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    nodes = jax.tree.leaves(opt_state, is_leaf=is_schedule)
    return next(node.count for node in nodes if is_schedule(node))


def make_optimizer(
    config: RunConfig, params: Any
) -> optax.GradientTransformation | optim.ScaledTransformation:
    """The update rule with clipping, schedule and weight decay, in the formats of the config.

    Parameters with two or more axes, that of a stack of layers not counted, have weight decay.
    Where the config names formats of weights or moments, this is `unitscale.optim.scaled`.
    """
    settings, precision = config.optimizer, config.precision
    schedule = make_schedule(settings, config.train.steps)
    decays = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim - _is_stacked(path) >= 2, params, is_leaf=is_scaled
    )
    decay = 0.0 if settings.umup else settings.weight_decay
    b1, b2, eps = settings.b1, settings.b2, settings.adam_eps
    if settings.name == "sgd":
        rule = optax.sgd(schedule, momentum=b1 or None)
    elif settings.name == "lion":
        rule = optax.lion(schedule, b1=b1, b2=b2, weight_decay=decay, mask=decays)
    elif settings.name == "muon":
        rule = optax.contrib.muon(
            schedule,
            beta=b1,
            adam_b1=b1,
            adam_b2=b2,
            eps=eps,
            consistent_rms=_MUON_RMS,
            muon_weight_dimension_numbers=optim.muon_axes(params),
        )
    elif settings.name == "adam" or settings.umup:
        rule = optax.adam(schedule, b1=b1, b2=b2, eps=eps)
    else:
        rule = optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=decay, mask=decays)
    if settings.umup:
        kind = settings.name if settings.name in ("sgd", "muon") else "adam"
        rule = optim.umup(rule, params, optimizer=kind, multipliers={**settings.multipliers})
    chain: list[optax.GradientTransformation] = [rule]
    if settings.clip_norm is not None:
        chain.insert(0, optax.clip_by_global_norm(settings.clip_norm))
    if settings.umup and settings.weight_decay:
        # After the learning rates: the share of a weight that a step removes depends on neither
        # them nor the schedule.
        chain.append(optim.independent_weight_decay(settings.weight_decay, decays))
    if not precision.scaled_state:
        return optax.chain(*chain)
    first, second = precision.moments or (None, None)
    return optim.scaled(
        optax.chain(*chain),
        weights=precision.weights,
        moments=(first, second),
        rounding=precision.rounding,
        key=config.seed,
        min_size=precision.min_size,
    )


def _is_stacked(path: Any) -> bool:
    """Return True if the first axis of the parameter at a path counts layers."""
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return "layers" in keys[:-1] and not keys[keys.index("layers") + 1].isdecimal()


class Skips(NamedTuple):
    """Steps left out, as their loss or gradient was not finite: in all, and since a good one."""

    total: jax.Array
    in_a_row: jax.Array


class LossScale(NamedTuple):
    """A loss scale that follows the gradients (Micikevicius et al., 2018), for comparison.

    A step whose gradient is not finite is left out and halves the scale; 2000 others double it.
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


def build_model(config: RunConfig) -> nnx.Module:
    """The model of a config, with the policies that single layers have."""
    model = recipe_of(config).build(config)
    try:
        set_policies(model, config.precision.layers)
    except ValueError as error:
        raise RecipeError(f"precision.layers: {error}") from error
    return model


def init_state(
    config: RunConfig,
) -> tuple[nnx.GraphDef, optax.GradientTransformation, TrainState]:
    """The model's structure, its optimizer, and the state before the first step."""
    graphdef, params, rest = nnx.split(build_model(config), nnx.Param, ...)
    optimizer = make_optimizer(config, params)
    if isinstance(optimizer, optim.ScaledTransformation):
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
    restored = restore(trained, checkpoints, state, None, say)
    checkpoints.close()
    if restored is None:
        raise RecipeError(f"name: the run in {folder} has no checkpoint; train it first")
    return graphdef, restored


def take_weights(
    model: nnx.Module,
    run: RunConfig,
    needed: Collection[str] | None = None,
    wanted: Collection[str] = (),
) -> None:
    """Set the parameters of a model in place to those that a run has under the same paths.

    The run must have those of the parts in `needed` (None: all); those in `wanted` are taken too.
    """
    # Values are read from the disk even if the caller traces, such as for shapes alone.
    with jax.ensure_compile_time_eval():
        _, state = load_trained(run, lambda message: None)
        # Uncommitted to a device, like new arrays: a step whose inputs are committed in part
        # returns all of them committed, and compiles again for its results.
        trained = nnx.to_flat_state(state.params)
        found = {path: np.asarray(to_array(leaf.get_value())) for path, leaf in trained}
    own = nnx.state(model, nnx.Param)
    wrong = []
    for path, variable in nnx.to_flat_state(own):
        value = variable.get_value()
        shape = found[path].shape if path in found else "none"
        must = needed is None or path[0] in needed
        if must and shape != value.shape:
            wrong.append(f"{'.'.join(map(str, path))} {value.shape}, the run has {shape}")
        elif must or (path in found and path[0] in wanted):
            variable.set_value(jnp.asarray(found[path], value.dtype))
    if wrong:
        raise RecipeError(
            f"init: the weights in {run_folder(run)} do not fit: expected {'; '.join(wrong)}; give "
            "the run of a model of this shape"
        )
    nnx.update(model, own)


def with_run_tokenizer(config: Run) -> Run:
    """A config with the tokenizer that its run was trained with, whatever its own says."""
    folder = existing_run(config)
    trained = written_config(folder, type(config))
    if not isinstance(config.data, DataConfig) or not isinstance(trained.data, DataConfig):
        return config
    is_byte = trained.data.tokenizer.kind == "byte"
    return _with_tokenizer(config, None if is_byte else folder / TOKENIZER_FILE)


def with_kept_tokenizer(config: Run) -> Run:
    """A config with the tokenizer that an earlier start of its run left, if one did."""
    data, file = config.data, run_folder(config) / TOKENIZER_FILE
    if not isinstance(data, DataConfig) or data.tokenizer.kind == "byte" or not file.exists():
        return config
    return _with_tokenizer(config, file)


def _with_tokenizer(config: Run, file: Path | None) -> Run:
    tokenizer = TokenizerConfig() if file is None else TokenizerConfig(kind="file", path=str(file))
    data = config.data.model_copy(update={"tokenizer": tokenizer})
    return config.model_copy(update={"data": data})

"""The training state: number formats, optimizer, initialization, and restored checkpoints."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from unitscale import as_scaled, cast, nn, optim, to_array
from unitscale.core import is_scaled
from unitscale.nn import AmaxState, Overflow, OverflowMonitor
from unitscale.parallel import AutoScale
from unitscale.quant import QuantState, Static, Unit
from unitscale.transforms import scalify

from ..config import TOKENIZER_FILE, OptimizerConfig, PrecisionConfig, RunConfig, TokenizerConfig
from ..errors import RecipeError, Say
from ..recipe import recipe_of
from .checkpoint import Checkpoints, Restored
from .folder import existing_run, run_folder, written_config
from .processes import place

Run = TypeVar("Run", bound=RunConfig)


def make_policy(precision: PrecisionConfig) -> nn.Policy:
    """Make the policy of layers; with a monitor, its matmuls count elements that saturate."""
    policy = nn.as_policy(precision.policy)
    if precision.readout == "gradients":
        policy = policy.with_quantized_readout(gradients_only=True)
    if precision.monitor is not None and policy.matmul and policy.matmul.strategy == Unit():
        matmul = dataclasses.replace(policy.matmul, strategy=Static())  # counts; scale is 1
        policy = dataclasses.replace(policy, matmul=matmul)
    return policy.with_quantized_readout() if precision.readout is True else policy


def scalified(precision: PrecisionConfig, f: Callable[..., Any]) -> Callable[..., Any]:
    """Apply `unitscale.scalify` to a function if the config asks for it."""
    return scalify(f) if precision.scalify else f


def scaled(precision: PrecisionConfig, tree: Any, scale: Any = None) -> Any:
    """Convert floating arrays to ScaledArrays in scalify's format, if the config asks for it.

    Give batches a `scale` of 1: their floating arrays are near 1.
    """
    return as_scaled(tree, scale, jnp.dtype(precision.scalify)) if precision.scalify else tree


def plain(precision: PrecisionConfig, tree: Any) -> Any:
    """Convert the ScaledArrays of a scalified program to float32 arrays."""
    return to_array(tree) if precision.scalify else tree


def watch_overflow(
    config: RunConfig, graphdef: nnx.GraphDef, state: Any, say: Say
) -> tuple[Any, dict[str, float]]:
    """Return the state, rebalanced if the config asks for it, and saturated shares by tensor."""
    if config.precision.monitor is None:
        return state, {}
    monitor = OverflowMonitor(limit=config.precision.monitor)
    model = nnx.merge(graphdef, state.params, state.rest)

    def name(entry: Overflow) -> str:
        return f"{entry.layer.rpartition('.')[0]}.{entry.tensor}"

    shares = {f"saturated/{name(entry)}": entry.share for entry in monitor.read(model)}
    if config.precision.rebalance and (moved := monitor.rebalance(model)):
        for entry in moved:
            say(f"{name(entry)}: {entry.share:.2%} saturated, scale now {entry.scale:g}")
        others = nnx.filter_state(state.rest, nnx.Not(AmaxState))
        rest = nnx.merge_state(nnx.state(model, AmaxState), others)
        # On the devices of the old arrays, as the compiled step expects.
        rest = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), rest, state.rest)
        state = state._replace(rest=rest)
    return state, shares


def formats(config: RunConfig) -> dict[str, Any]:
    """Return the keys that determine the formats of a run's state, as JSON values."""
    precision = config.precision.model_dump(mode="json")
    return {"precision": precision, "skip_nonfinite": config.optimizer.skip_nonfinite}


def with_formats(config: RunConfig, facts: dict[str, Any]) -> RunConfig:
    """Return the config with the formats in which a checkpoint, described by facts, was saved."""
    saved = facts.get("formats", {})
    if "precision" not in saved:  # of an earlier version, which could not convert formats
        return config
    precision = PrecisionConfig.model_validate(saved["precision"])
    optimizer = config.optimizer.model_copy(update={"skip_nonfinite": saved["skip_nonfinite"]})
    return config.model_copy(update={"precision": precision, "optimizer": optimizer})


def convert(state: Any, written: RunConfig, config: RunConfig, optimizer: Any, like: Any) -> Any:
    """Convert the state of the config `written` to the formats of `config`, rounding once."""
    source, target = plain(written.precision, state), plain(config.precision, like)
    params = _stored(config, optimizer, to_array(source.params, jnp.float32))
    known = dict(jax.tree_util.tree_leaves_with_path(source.rest, is_leaf=is_amax))

    def carried(path: Any, leaf: Any) -> Any:
        value = known.get(path, leaf)
        if is_amax(leaf):
            return value if value.strategy == leaf.strategy else leaf
        return value if value.dtype == leaf.dtype else value.astype(leaf.dtype)

    def kept(name: str) -> Any:
        both = getattr(source, name), getattr(target, name)
        return both[1] if None in both else both[0]

    converted = TrainState(
        params,
        jax.tree_util.tree_map_with_path(carried, target.rest, is_leaf=is_amax),
        optim.convert_state(source.opt_state, optimizer.init(params)),
        source.step,
        *map(kept, ("auto", "skips", "loss_scale")),
    )
    return scaled(config.precision, converted)


def is_amax(node: Any) -> bool:
    return isinstance(node, QuantState)


# With this RMS, Muon's best learning rate for hidden kernels is about that of Adam for the rest.
# Plain models use about 0.02 of the weights' own spectral norm.
_MUON_RMS = 2.0**-5


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Make the schedule: linear warm-up from 0, then decay to `final_fraction` of the peak."""
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
    """Return the number of updates so far, without skipped steps, from the schedule's state."""
    (_, schedule), *_ = optax.tree.get_all_with_path(opt_state, "ScaleByScheduleState")
    return schedule.count


def make_optimizer(
    config: RunConfig, params: Any
) -> optax.GradientTransformation | optim.ScaledTransformation:
    """Make a config's optimizer: update rule, clipping, schedule, weight decay, and formats."""
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
        # Last in the chain, so that the decay does not depend on learning rates or the schedule.
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
    """Return True for a parameter of stacked layers, which has one more axis."""
    keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return "layers" in keys[:-1] and not keys[keys.index("layers") + 1].isdecimal()


def _stored(config: RunConfig, optimizer: Any, params: Any) -> Any:
    """Return parameters in the optimizer's formats, with a scale for each layer and expert."""
    if not isinstance(optimizer, optim.ScaledTransformation):
        return params
    if getattr(getattr(config, "model", None), "scan", None) != "auto":  # as in earlier versions
        return optimizer.scale_params(params)
    axes = jax.tree_util.tree_map_with_path(
        lambda path, leaf: max(leaf.ndim - 2, int(_is_stacked(path))), params, is_leaf=is_scaled
    )
    return optimizer.scale_params(params, stack_axes=axes)


class Skips(NamedTuple):
    """Counts of steps that were skipped because the loss or a gradient was not finite."""

    total: jax.Array
    in_a_row: jax.Array

    def after(self, finite: jax.Array) -> Self:
        skipped = 1 - finite.astype(jnp.int32)
        return self._replace(total=self.total + skipped, in_a_row=(self.in_a_row + 1) * skipped)


class LossScale(NamedTuple):
    """A dynamic loss scale: halved when gradients are not finite, doubled after 2000 good steps."""

    value: jax.Array
    good: jax.Array  # good steps since the value last changed

    def after(self, finite: jax.Array) -> Self:
        doubles = self.good + 1 >= 2000
        grown = jnp.where(doubles, 2 * self.value, self.value)
        value = jnp.where(finite, grown, self.value / 2)
        return self._replace(value=value, good=jnp.where(finite & ~doubles, self.good + 1, 0))


class TrainState(NamedTuple):
    """Everything that a step changes; `rest` is model state such as PRNG keys and amax."""

    params: nnx.State
    rest: nnx.State
    opt_state: optax.OptState
    step: jax.Array
    auto: AutoScale | None = None  # if gradients are exchanged in FP8
    skips: Skips | None = None  # if steps may be skipped
    loss_scale: LossScale | None = None  # if it is dynamic


def merged(config: RunConfig, graphdef: nnx.GraphDef, state: TrainState) -> Any:
    """Return the model of a state, with plain arrays where scalify had ScaledArrays."""
    return nnx.merge(graphdef, *plain(config.precision, (state.params, state.rest)))


def build_model(config: RunConfig) -> nnx.Module:
    """Build the model of a config, and set the policies of single layers."""
    model = recipe_of(config).build(config)
    if config.precision.initial is not None:
        for _, layer in nnx.iter_modules(model):
            if isinstance(layer, nn.Dense):
                kernel = layer.kernel.get_value()
                layer.kernel.set_value(cast(kernel, config.precision.initial).astype(kernel.dtype))
    nn.set_policies(model, config.precision.layers)
    return model


def init_state(config: RunConfig) -> tuple[nnx.GraphDef, optax.GradientTransformation, TrainState]:
    """Return the model's graphdef, its optimizer, and the state before the first step."""
    graphdef, params, rest = nnx.split(build_model(config), nnx.Param, ...)
    optimizer, precision = make_optimizer(config, params), config.precision
    params = _stored(config, optimizer, params)
    none = jnp.zeros((), jnp.int32)
    state = TrainState(params, rest, optimizer.init(params), none)
    if config.optimizer.skip_nonfinite:
        state = state._replace(skips=Skips(none.copy(), none.copy()))
    if (precision.exchange or "").startswith("float8"):
        state = state._replace(auto=AutoScale.create(params))
    if precision.loss_scale == "dynamic":
        state = state._replace(loss_scale=LossScale(jnp.float32(2.0**16), none.copy()))
    return graphdef, optimizer, scaled(precision, state)


def restore(
    config: RunConfig, checkpoints: Checkpoints, state: TrainState, mesh: Mesh | None, say: Say
) -> Restored | None:
    """Read the newest complete checkpoint, in the formats and over the mesh of the config."""

    written = config  # in the formats of the checkpoint

    def like(facts: dict[str, Any]) -> TrainState:
        nonlocal written
        written = with_formats(config, facts)
        is_same = formats(written) == formats(config)
        return state if is_same else place(init_state(written)[2], mesh)

    restored = checkpoints.restore(like, say)
    if restored is None or formats(written) == formats(config):
        return restored
    say(f"converting the checkpoint of step {restored.step} to this config's formats")
    _, optimizer, first = init_state(config)
    converted = convert(restored.state, written, config, optimizer, first)
    return restored._replace(state=place(converted, mesh))


def load_trained(config: RunConfig, say: Say) -> tuple[nnx.GraphDef, TrainState]:
    """Load the state in a run's newest complete checkpoint."""
    graphdef, restored = load_checkpoint(config, say)
    return graphdef, restored.state


def load_checkpoint(config: RunConfig, say: Say) -> tuple[nnx.GraphDef, Restored]:
    """Load a run's newest complete checkpoint, without changing anything on disk."""
    folder = existing_run(config)
    trained = written_config(folder, type(config))
    trained = trained if trained.keeps_fp8 else trained.resumed
    longest, length = trained.longest, config.sequence
    if longest is not None and length is not None and length > longest:
        what = f"data.sequence_length: the run in {folder} learned {longest} positions"
        raise RecipeError(f"{what}; got {length}; use at most {longest}")
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
    """Copy a run's parameters to parts of a model: `needed` (None: all), `wanted` if present."""
    # Load arrays even if the caller is tracing, for example to get shapes.
    with jax.ensure_compile_time_eval():
        _, state = load_trained(run, lambda message: None)
        # As NumPy arrays, not committed to a device: a step with some committed inputs returns
        # only committed results, and would compile again for them.
        trained = nnx.to_flat_state(state.params)
        found = {path: np.asarray(to_array(leaf.get_value())) for path, leaf in trained}
    own = nnx.state(model, nnx.Param)
    for path, variable in nnx.to_flat_state(own):
        value = variable.get_value()
        shape = found[path].shape if path in found else "none"
        must = needed is None or path[0] in needed
        if must and shape != value.shape:
            name, folder = ".".join(map(str, path)), run_folder(run)
            what = f"init: the weights in {folder} do not fit: expected {name} {value.shape}"
            raise RecipeError(f"{what}; the run has {shape}; give the run of a model of this shape")
        if must or (path in found and path[0] in wanted):
            variable.set_value(jnp.asarray(found[path], value.dtype))
    nnx.update(model, own)


def with_kept_tokenizer(config: Run, *, needed: bool = False) -> Run:
    """Return the config with the tokenizer stored in its run's folder, if there is one."""
    file, tokenizer = run_folder(config) / TOKENIZER_FILE, getattr(config.data, "tokenizer", None)
    if tokenizer is None or tokenizer.kind == "byte" or not (needed or file.exists()):
        return config
    kept = {"tokenizer": TokenizerConfig(kind="file", path=str(file))}
    return config.model_copy(update={"data": config.data.model_copy(update=kept)})

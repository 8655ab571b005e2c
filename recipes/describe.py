"""What a config amounts to before anything is allocated: parameters, FLOPs, bytes.

Everything is read from shapes and from the lowered program, so a model that no machine here could
hold is described in a minute. What a step costs is counted for one and for two layers where all are
alike: each of the others costs what the second one does.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast, get_args

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh, AxisType, Mesh

from unitscale import grad
from unitscale.core import is_scaled
from unitscale.ops import attention_paths
from unitscale.parallel import batch_axes, param_shardings

from .config import RunConfig, TransformerConfig
from .hf import Frozen
from .run.batch import make_loss, over_amax
from .run.recipe import recipe_of
from .run.state import TrainState
from .run.step import abstract_step


class Share(NamedTuple):
    """Bytes on one device of a mesh, as `recipes.run.placement` lays a run out.

    Args:
      weights: Of trained parameters.
      frozen: Of those that are not trained.
      gradients: Of gradients, which lie as their parameters do.
      optimizer: Of the optimizer's state.
      activations: Of a step, of the device's examples and tokens; hidden units and heads count in
        full, which `mesh.tensor` divides too.
    """

    weights: int
    frozen: int
    gradients: int
    optimizer: int
    activations: int


class Description(NamedTuple):
    """Facts about one training step.

    Args:
      parameters: How many, frozen ones too, by the part of the model that has them.
      size: Of a step, in `data.step_unit`.
      flops: Of a step, forward, backward and update, as XLA counts the lowered program, with every
        turn of its scans.
      trained: How many of them are trained.
      weights: Bytes of trained parameters in the format they are kept in, scales included.
      frozen: Bytes of those that are not trained.
      gradients: Bytes of their gradients.
      optimizer: Bytes of the optimizer's state.
      activations: Bytes of one example that the backward pass is given, before XLA fuses any.
      attention: The implementations that `ops.dot_product_attention` takes in the step, and why.
      share: What each device of the config's mesh holds; None for one device.
    """

    parameters: dict[str, int]
    size: int
    flops: float
    trained: int
    weights: int
    frozen: int
    gradients: int
    optimizer: int
    activations: int
    attention: tuple[str, ...]
    share: Share | None = None


def describe(config: RunConfig) -> Description:
    """Traces and lowers the training step of a config on shapes alone."""
    config = config.resumed  # the shapes are the config's: the weights of a folder are not read
    _, _, (state, _, _) = abstract_step(config)
    with attention_paths() as taken:
        gradients, own_gradients = _gradients(config)
    flops, activations = _over_layers(config, _cost)
    parameters: dict[str, int] = {}
    frozen = _frozen(state)
    share, mesh = None, abstract_mesh(config)
    if mesh is not None:
        own = on_device(state, mesh)
        ways = math.prod(mesh.shape[axis] for axis in (*batch_axes(mesh), "context"))
        share = Share(
            bytes_of(own.params),
            bytes_of(_frozen(own)),
            own_gradients,
            bytes_of(own.opt_state),
            config.data.batch_size * activations // ways,
        )
    for tree in (state.params, frozen):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled):
            part = str(getattr(path[0], "key", path[0]))
            parameters[part] = parameters.get(part, 0) + math.prod(leaf.shape)
    leaves = jax.tree.leaves(state.params, is_leaf=is_scaled)
    return Description(
        parameters,
        config.data.step_size,
        flops,
        sum(math.prod(leaf.shape) for leaf in leaves),
        bytes_of(state.params),
        bytes_of(frozen),
        gradients,
        bytes_of(state.opt_state),
        activations,
        tuple(dict.fromkeys(f"{path.implementation}: {path.reason}" for path in taken)),
        share,
    )


def _frozen(state: TrainState) -> Any:
    return nnx.split_state(state.rest, Frozen, ...)[0]


def abstract_mesh(config: RunConfig) -> AbstractMesh | None:
    """The mesh of a config, of any number of devices; None for one device."""
    axes = {} if config.mesh is None else config.mesh.model_dump(exclude={"gradients"})
    if math.prod(axes.values()) == 1:
        return None
    return AbstractMesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))


def on_device(tree: Any, mesh: AbstractMesh) -> Any:
    """The shapes of what one device of a mesh holds of a tree, by the rule of a run."""

    def cut(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)

    # Of the mesh its axes are read alone.
    return jax.tree.map(cut, tree, param_shardings(tree, cast(Mesh, mesh)))


def _by_remat(config: RunConfig) -> dict[str, RunConfig]:
    """The config at each `model.remat`; empty where a model has none."""
    shape = getattr(config, "model", None)
    if not isinstance(shape, TransformerConfig) or shape.library == "plain":
        return {}
    modes = get_args(type(shape).model_fields["remat"].annotation)
    shapes = {mode: shape.model_copy(update={"remat": mode}) for mode in modes}
    return {mode: config.model_copy(update={"model": other}) for mode, other in shapes.items()}


def _over_layers(config: RunConfig, count: Callable[[RunConfig], tuple]) -> tuple:
    """The numbers that ``count`` gives, those of many equal layers from those of one and of two."""
    shape = getattr(config, "model", None)
    if not isinstance(shape, TransformerConfig) or shape.layers <= 2 or config.precision.layers:
        return count(config)
    few = (shape.model_copy(update={"layers": n}) for n in (1, 2))
    one, two = (count(config.model_copy(update={"model": other})) for other in few)
    return tuple(a + (shape.layers - 1) * (b - a) for a, b in zip(one, two, strict=True))


def _cost(config: RunConfig) -> tuple[float, int]:
    """FLOPs of a step, and bytes of activations of an example."""
    graphdef, step, shapes = abstract_step(config)
    with attention_paths("plain"):  # XLA knows no FLOPs of a kernel
        flops = _flops(step.trace(*shapes))
    loss = make_loss(graphdef, deterministic=False)
    one, two = (_saved_bytes(loss, shapes[0], config, size) for size in (1, 2))
    return flops, two - one


def program_flops(jaxpr: ClosedJaxpr) -> float:
    """FLOPs of a program as XLA counts it, which counts the body of a loop as if it ran once."""
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in jaxpr.in_avals]
    return _flops(jax.jit(jaxpr_as_fun(jaxpr)).trace(*shapes))


def _flops(traced: Any) -> float:
    cost = traced.lower().cost_analysis()
    assert cost is not None, "XLA counts the FLOPs of a lowered program on every platform"
    return cost["flops"] + _of_further_turns(traced.jaxpr.jaxpr)


def _of_further_turns(jaxpr: Jaxpr) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        for inner in inner_programs(eqn):
            total += _of_further_turns(getattr(inner, "jaxpr", inner))
            if eqn.primitive.name == "scan":
                total += (eqn.params["length"] - 1) * program_flops(inner)
    return total


def inner_programs(eqn: Any) -> list[Any]:
    """The jaxprs, closed or open, among the parameters of an equation."""
    leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr)
    return [leaf for leaf in leaves if _is_jaxpr(leaf)]


def _is_jaxpr(x: Any) -> bool:
    return isinstance(x, (ClosedJaxpr, Jaxpr))


def _gradients(config: RunConfig) -> tuple[int, int]:
    """Bytes of gradients, and of those on one device of the mesh."""
    if getattr(getattr(config, "model", None), "scan", False):
        return _gradient_bytes(config)  # a stack is cut as a whole, and traced as one layer
    return _over_layers(config, _gradient_bytes)


def _gradient_bytes(config: RunConfig) -> tuple[int, int]:
    """Those of gradients as the step has them: plain arrays, or scaled ones under scalify."""
    graphdef, _, (state, batch, _) = abstract_step(config)
    loss = make_loss(graphdef, deterministic=False)
    by = jax.grad if config.precision.scalify else grad

    def differentiate(params: Any, rest: Any, batch: Any) -> Any:
        amax, of_amax = over_amax(loss, rest)
        return by(of_amax, (0, 1), allow_int=True)(params, amax, batch)[0]

    gradients = jax.eval_shape(differentiate, state.params, state.rest, batch)
    mesh = abstract_mesh(config)
    own = gradients if mesh is None else on_device(gradients, mesh)
    return bytes_of(gradients), bytes_of(own)


def report(config: RunConfig) -> Iterator[str]:
    """The lines that `python -m recipes describe` prints."""
    facts = describe(config)
    total = sum(facts.parameters.values())
    size, unit = config.data.batch_size, config.data.step_unit
    yield f"{config.name}: recipe {config.recipe}, policy {config.precision.policy}"
    yield f"parameters    {total:>22,}"
    for part, count in facts.parameters.items():
        yield f"  {part:<12}{count:>22,}"
    if facts.frozen:
        yield f"trained       {facts.trained:>22,}"
    yield f"step          {facts.size:>22,} {unit} in {size} examples"
    yield f"FLOPs a step  {facts.flops:>22.4g}"
    each = facts.flops / facts.size
    yield f"FLOPs each    {each:>22.4g} for one of the {unit}, {each / total:.2f} a parameter"
    kept = {"weights": facts.weights, "gradients": facts.gradients, "optimizer": facts.optimizer}
    if facts.frozen:
        kept = {"frozen": facts.frozen, **kept}
    for name, count in kept.items():
        yield f"{name:<14}{count:>22,} bytes, {count / total:.2f} a parameter"
    yield f"state         {sum(kept.values()):>22,} bytes"
    yield (
        f"activations   {facts.activations:>22,} bytes an example are saved for the backward pass, "
        f"{size * facts.activations:,} a step, before XLA fuses any"
    )
    yield f"in all        {sum(kept.values()) + size * facts.activations:>22,} bytes"
    for mode, other in _by_remat(config).items():
        known = facts.flops, facts.activations
        flops, activations = known if other == config else _over_layers(other, _cost)
        yield (
            f"  model.remat={mode:<6}{activations:>16,} bytes an example, "
            f"{flops:.4g} FLOPs a step, {flops / facts.flops:.2f} times"
        )
    for line in facts.attention:
        yield f"attention     {line}"
    mesh = abstract_mesh(config)
    if mesh is not None and facts.share is not None:
        yield from _of_device(mesh, facts.share)


def _of_device(mesh: AbstractMesh, share: Share) -> Iterator[str]:
    shown = ", ".join(f"{name} {n}" for name, n in mesh.shape.items() if n > 1)
    yield f"on each of {mesh.size} devices, mesh {shown}"
    most = ", at most: tensor divides hidden units and heads too"
    most = most if mesh.shape["tensor"] > 1 else ""
    for name, count in share._asdict().items():
        if name != "frozen" or count:
            note = f" a step{most}" if name == "activations" else ""
            yield f"  {name:<12}{count:>22,} bytes{note}"
    yield f"  {'in all':<12}{sum(share):>22,} bytes"


def _saved_bytes(loss: Callable, state: TrainState, config: RunConfig, size: int) -> int:
    """Bytes that the backward pass of `size` examples is given, parameters included."""

    def backward(params: Any, rest: Any, batch: Any) -> Any:
        amax, of_amax = over_amax(loss, rest)
        return jax.vjp(lambda params, amax: of_amax(params, amax, batch), params, amax)[1]

    data = config.data.model_copy(update={"batch_size": size})
    batch = recipe_of(config).abstract_batch(config.model_copy(update={"data": data}))
    return bytes_of(jax.eval_shape(backward, state.params, state.rest, batch))


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays of a tree, or of their shapes."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

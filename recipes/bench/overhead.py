"""What unit scaling costs: step time over plain `flax.nnx`, the operations factors add, compiling.

    python -m recipes bench overhead

Step time is that of the whole training step of `recipes.train`, in float32, for the same shape in
both libraries, the plain one as it is and with the inputs of its Linear layers flattened to
matrices, whose gradients XLA's CPU backend computes much faster. Operations are those of the loss
and its gradient as JAX lowers them, once as they are and once with every factor of
`unitscale.rules` set to 1, which leaves its multiplication out. Compile time is that of a step of
48 layers, traced and compiled one by one and as a scan. A step over 4,096 tokens of context is run
with attention in chunks and with all weights at once. With `--peer PYTHON` the step is also timed
in turns with that of PyTorch's unit-scaling, in another environment: `pip install torch
unit-scaling==0.3.5` there.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any
from unittest import mock

import jax
import typer
from flax import nnx

from unitscale import rules
from unitscale.ops import attention_paths

from ..bert.config import BertConfig
from ..config import RunConfig
from ..describe import program_flops
from ..gpt.config import GPTConfig
from ..registry import CONFIGS, load_kind
from ..run.batch import make_loss
from ..run.recipe import build_model, recipe_of
from ..run.step import abstract_step
from ._context import LONG, long_context
from ._peer import beside_peer
from ._table import JsonPath, Table, asked, publish
from ._timing import compared, interleaved, random_batch, stepper

LARGER = ("model.width=512", "model.heads=8", "data.sequence_length=256", "data.batch_size=4")
# The only MLP of PyTorch's unit-scaling.
GATED = ("model.mlp=gated",)
DEEP = ("model.layers=48",)
MOST_TIME, MOST_TIME_FLAT, MOST_FLOPS, MOST_COMPILING = 1.05, 1.0, 0.002, 1 / 8

# Token ids as the models of these shapes were trained on them.
GPT2 = ("policy=float32", "model.vocab=50257", "model.tied_readout=true", "data.batch_size=8")
BERT = ("policy=float32", "model.dropout=0.0", "data.pairs=none", "data.batch_size=8")


def main(
    rounds: Annotated[int, typer.Option(min=4, help="timed steps of each library")] = 60,
    larger: Annotated[bool, typer.Option(help="also time a model 512 wide")] = True,
    count: Annotated[bool, typer.Option(help="also count operations")] = True,
    deep: Annotated[bool, typer.Option(help="also compile a step of 48 layers")] = True,
    context: Annotated[
        int, typer.Option(min=0, help="timed steps over 4,096 tokens of context; 0 for none")
    ] = 4,
    peer: Annotated[
        str | None,
        typer.Option(help="an interpreter with torch and unit-scaling, whose steps to time too"),
    ] = None,
    json: JsonPath = None,
) -> None:
    """Prints step time over plain flax.nnx, what factors add, and what a scan saves to compile."""
    parity = CONFIGS / "gpt" / "parity.yaml"
    shapes = [(), LARGER] if larger else [()]
    timed = [load_kind(GPTConfig, parity, ["policy=float32", *shape]) for shape in shapes]
    title = "Time of a training step, unitscale float32 over plain flax.nnx float32"
    tables = [
        Table(title, [time_steps(config, rounds) for config in timed]),
        Table(
            f"{title} whose Linear layers see matrices",
            [time_steps(config, rounds, flat=True) for config in timed],
        ),
    ]
    if count:
        gpt = load_kind(GPTConfig, CONFIGS / "gpt" / "gpt2-small.yaml", GPT2)
        bert = load_kind(BertConfig, CONFIGS / "bert" / "large.yaml", BERT)
        rows = [count_factors("GPT-2 small", gpt), count_factors("BERT Large", bert)]
        rows[0]["over plain"] = rows[0]["with factors"] / flops(plain(gpt))
        tables.append(Table("Floating-point operations of loss and gradient", rows))
    if deep:
        config = load_kind(GPTConfig, parity, ["policy=float32", *DEEP])
        tables.append(Table("Compiling a training step of a deep model", [time_compiling(config)]))
    if context:
        config = load_kind(GPTConfig, parity, [*LONG])
        title = "Attention in chunks over plain attention, in a training step"
        tables.append(Table(title, long_context(config, context)))
    if peer:
        config = load_kind(GPTConfig, parity, ["policy=float32", *GATED])
        tables.append(beside_peer(peer, config, rounds))
    notes = [
        f"Each library's step was timed {rounds} times, in turns. ratio: median over rounds; "
        "quartiles likewise.",
        "over plain: all operations over those of the plain flax.nnx model of that shape, which "
        "counts what the backward pass computes again, too.",
    ]
    publish("overhead", tables, json, notes[: 1 + count])


def plain(config: GPTConfig) -> GPTConfig:
    """The same shape and optimizer in plain flax.nnx."""
    model = config.model.model_copy(update={"library": "plain"})
    optimizer = config.optimizer.model_copy(update={"umup": False})
    return config.model_copy(update={"model": model, "optimizer": optimizer})


def time_steps(config: GPTConfig, rounds: int, *, flat: bool = False) -> dict[str, Any]:
    """One row: the training steps of a config's model in both libraries."""
    batch = random_batch(config)
    other = stepper(plain(config), batch)
    if flat:
        with flattened():
            other()
    times = interleaved(stepper(config, batch), other, rounds)
    shape, data = config.model, config.data
    name = (
        f"{shape.width} wide, {shape.layers} layers, {data.batch_size} x {data.sequence_length} "
        "tokens"
    )
    most = MOST_TIME_FLAT if flat else MOST_TIME
    return {"model": name, **compared("unitscale", "plain", times, most)}


@contextmanager
def flattened() -> Iterator[None]:
    """Within the block, `nnx.Linear` multiplies matrices: what is traced sees no batch of them."""
    linear = nnx.Linear.__call__

    def call(self: nnx.Linear, x: jax.Array, **options: Any) -> jax.Array:
        rows = linear(self, x.reshape(-1, x.shape[-1]), **options)
        return rows.reshape(*x.shape[:-1], -1)

    with mock.patch.object(nnx.Linear, "__call__", call):
        yield


def time_compiling(config: GPTConfig) -> dict[str, Any]:
    """One row: seconds to compile the step of a config, layers one by one and as a scan."""
    model = config.model
    seconds = {}
    for name, scan in (("scan", True), ("one by one", False)):
        shape = model.model_copy(update={"scan": scan})
        _, step, arguments = abstract_step(config.model_copy(update={"model": shape}))
        start = time.perf_counter()
        step.lower(*arguments).compile()
        seconds[name] = round(time.perf_counter() - start, 3)
    ratio = seconds["scan"] / seconds["one by one"]
    return {
        "model": f"{model.width} wide, {model.layers} layers",
        "one by one, s": seconds["one by one"],
        "scan, s": seconds["scan"],
        "ratio": ratio,
        **asked(ratio, most=MOST_COMPILING, form=".3f"),
    }


def count_factors(name: str, config: GPTConfig | BertConfig) -> dict[str, Any]:
    """One row: the operations of a config's loss and gradient with its factors and without."""
    with_factors = flops(config)
    with unfactored():
        without = flops(config)
    added = with_factors / without - 1
    return {
        "shape": name,
        "sequences": config.data.batch_size,
        "tokens each": config.data.sequence_length,
        "with factors": with_factors,
        "without": without,
        "added": added,
        **asked(added, most=MOST_FLOPS, form=".1%"),
    }


def flops(config: RunConfig) -> float:
    """Floating-point operations of loss and gradient, before XLA optimizes the program."""
    model = nnx.eval_shape(lambda: build_model(config))
    return flops_of(model, recipe_of(config).abstract_batch(config))


def flops_of(model: nnx.Module, batch: Any) -> float:
    """Those of an abstract model and batch."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    loss = jax.value_and_grad(make_loss(graphdef))
    with attention_paths("plain"):  # of a kernel XLA knows none
        return program_flops(jax.make_jaxpr(loss)(params, rest, batch))


@contextmanager
def unfactored() -> Iterator[None]:
    """Within the block, what is traced has no factors: the rules return 1 for each of them.

    `rules.logit_factor` stays: dividing logits is part of attention, scaled or not.
    """
    with ExitStack() as stack:
        for name, rule in vars(rules).items():
            own = getattr(rule, "__module__", "").startswith(rules.__name__)
            if callable(rule) and own and not isinstance(rule, type):
                stack.enter_context(mock.patch.object(rules, name, _ones(name, rule)))
        yield


def _ones(name: str, rule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def call(*args, **kwargs):
        result = rule(*args, **kwargs)
        if isinstance(result, rules.Factors):
            return rules.Factors(1.0, (1.0,) * len(result.bwd))
        if isinstance(result, rules.Simulation):
            ones = rules.Factors(1.0, (1.0,) * len(result.factors.bwd))
            return dataclasses.replace(result, factors=ones)
        if isinstance(result, rules.ResidualFactors):
            return rules.ResidualFactors(branch=1.0, skip=1.0)
        if name == "normalized_weights":
            return (1.0,) * len(result)
        return result

    return call

"""Training under scalify follows training in float32."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.core import is_scaled
from unitscale.transforms import (
    scalify,
)


class Task(NamedTuple):
    """A loss of parameters and a batch, and where training starts."""

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any


def mlp() -> Task:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {
        "hidden": {"kernel": normal(16, 32) / 4, "bias": jnp.zeros(32)},
        "out": {"kernel": normal(32, 4) / 6, "bias": jnp.zeros(4)},
    }
    x = normal(64, 16)

    def loss(params: Any, batch: Any) -> jax.Array:
        x, target = batch
        hidden = jax.nn.gelu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
        return jnp.mean((hidden @ params["out"]["kernel"] + params["out"]["bias"] - target) ** 2)

    return Task(loss, params, (x, jnp.tanh(x @ normal(16, 4))))


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(jax.nn.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    def __init__(self, vocab: int, width: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x, mask = self.embed(ids), nnx.make_causal_mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


def transformer() -> Task:
    model = Transformer(11, 16, 1, nnx.Rngs(0))
    graph, params = nnx.split(model)
    ids = jnp.asarray(np.cumsum(np.random.default_rng(1).integers(1, 3, (8, 13)), axis=1) % 11)

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(graph, params)(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    return Task(loss, nnx.to_pure_dict(params), ids)


def step_of(task: Task, optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns the whole train step: gradients, optimizer and update."""

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(task.loss)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


STEPS = 50
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 4 * STEPS)),
    "momentum": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.sgd(0.02, momentum=0.9, nesterov=True)
    ),
}
TASKS = {"mlp": mlp, "transformer": transformer}


def losses_of(step: Any, params: Any, state: Any, batch: Any) -> tuple[np.ndarray, Any]:
    losses = []
    for _ in range(STEPS):
        params, state, loss = step(params, state, batch)
        losses.append(float(to_array(loss)))
    return np.asarray(losses), (params, state)


def noise_of(step: Any, problem: Task, state: Any, plain: np.ndarray, epsilon: float) -> np.ndarray:
    """How far the losses of the plain program move when its parameters are rounded once.

    The largest of three draws of the rounding, and no smaller than at an earlier step.
    """
    moved = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        params = jax.tree.map(
            lambda x, rng=rng: x * (1 + epsilon * rng.uniform(-0.5, 0.5, x.shape)).astype(x.dtype),
            problem.params,
        )
        moved.append(np.abs(losses_of(step, params, state, problem.batch)[0] - plain))
    return np.maximum.accumulate(np.max(moved, axis=0))


def check_scales(tree: Any) -> None:
    """Every scale is a power of two within two powers of two of the RMS of its value.

    One is what a measured scale allows; the other, what one step after it does.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_scaled):
        if isinstance(leaf, ScaledArray) and np.any(leaf.data):
            name = jax.tree_util.keystr(path)
            scale = float(leaf.scale)
            assert np.frexp(scale)[0] == 0.5, name
            rms = float(np.sqrt(np.mean(np.square(np.asarray(leaf.data, np.float64)))))
            assert 0.25 <= rms <= 4.0, f"{name}: data has RMS {rms}, scale {scale}"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("task", ["mlp", pytest.param("transformer", marks=pytest.mark.slow)])
def test_losses_follow_float32_and_scales_have_a_fixed_point(task: str, optimizer: str) -> None:
    problem: Task = TASKS[task]()
    rule = OPTIMIZERS[optimizer]()
    step, state = jax.jit(step_of(problem, rule)), rule.init(problem.params)
    plain, _ = losses_of(step, problem.params, state, problem.batch)
    assert plain[-1] < 0.7 * plain[0], "the task is one that is learned"
    for dtype in (jnp.float32, jnp.float16):
        epsilon = float(jnp.finfo(dtype).eps)
        # A step rounds some hundred times in a row, independently: the root of that, times one.
        bound = 10 * (noise_of(step, problem, state, plain, epsilon) + epsilon * plain)
        scaled = as_scaled((problem.params, state, problem.batch), dtype=dtype)
        losses, end = losses_of(jax.jit(scalify(step)), *scaled)
        far = np.abs(losses - plain) > bound
        assert not far.any(), (dtype, losses[far] - plain[far], bound[far])
        if dtype == jnp.float16:
            check_scales(end)
        floats = [x for x in jax.tree.leaves(end, is_leaf=is_scaled) if is_scaled(x)]
        assert {x.dtype for x in floats} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("mean", [0.0, 8.0, 32.0])
def test_layer_norm_of_flax(mean: float, dtype: Any) -> None:
    """Which takes the variance from the mean of squares."""
    x = np.random.default_rng(0).normal(mean, 1, size=(16, 512)).astype(np.float32)
    given = as_scaled(jnp.asarray(x), dtype=dtype)
    exact = np.asarray(to_array(given), np.float64)
    graph, params = nnx.split(nnx.LayerNorm(512, rngs=nnx.Rngs(0)))
    state = as_scaled(params, dtype=dtype)
    found = to_array(jax.jit(scalify(lambda p, x: nnx.merge(graph, p)(x)))(state, given))
    expected = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    atol = 2 * float(jnp.finfo(dtype).eps) * np.max(np.abs(expected))
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=atol)


TURNS = 200
# A rate at which a step is more than the rounding of the parameters, and 200 of them train.
RATE = 0.05
RATES = {"acprop": 0.01, "rmsprop": 0.01}
# What a learning rate alone does not make. The first estimates of methods that find their own rate
# are such that the first steps are not lost in the rounding of the parameters.
GIVEN: dict[str, Callable[[], Any]] = {
    "dadapt_adamw": lambda: optax.contrib.dadapt_adamw(estim_lr0=1e-3),
    "dog": lambda: optax.contrib.dog(1.0, init_step=("heuristic", 1e-2)),
    "dowg": lambda: optax.contrib.dowg(1.0, init_estim_sq_dist=1e-2),
    "dpsgd": lambda: optax.contrib.dpsgd(RATE, 1.0, 0.1, 0),
    "mechanize": lambda: optax.contrib.mechanize(optax.sgd(RATE), s_init=1e-2),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=jax.random.key(0)),
    "polyak_sgd": lambda: optax.polyak_sgd(1.0),
    "prodigy": lambda: optax.contrib.prodigy(1.0, estim_lr0=1e-3),
    "sam": lambda: optax.contrib.sam(
        optax.sgd(RATE), optax.chain(optax.contrib.normalize(), optax.sgd(RATE))
    ),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(RATE), RATE),
}
DEPRECATED = {"optimistic_adam"}
PER_EXAMPLE = {"dpsgd"}
PLAIN = {"dpsgd", "sam"}  # which take no further arguments


def optimizers() -> dict[str, Callable[[], Any]]:
    """Every function of optax and optax.contrib that takes a learning rate, and those given."""
    found = dict(GIVEN)
    for module in (optax, optax.contrib):
        for name, f in inspect.getmembers(module, inspect.isfunction):
            building_block = name.startswith(("_", "scale_")) or name in DEPRECATED
            if "learning_rate" in inspect.signature(f).parameters and not building_block:
                rate = RATES.get(name, RATE)
                found.setdefault(name, lambda f=f, rate=rate: f(learning_rate=rate))
    return found


def problem() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {"up": normal(6, 12) / 3, "bias": jnp.zeros(12), "down": normal(12, 3) / 4}
    x = normal(32, 6)
    return params, (x, jnp.tanh(x @ normal(6, 3)))


def example_loss(params: Any, batch: Any) -> jax.Array:
    x, target = batch
    return jnp.mean((jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"] - target) ** 2)


def optimizer_step(name: str, optimizer: Any) -> Callable[..., Any]:
    update = optax.with_extra_args_support(optimizer).update

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        def loss(p: Any) -> jax.Array:
            return example_loss(p, batch)

        value, grads = jax.value_and_grad(loss)(params)
        given = grads
        if name in PER_EXAMPLE:
            items = jax.tree.map(lambda x: x[:, None], batch)
            given = jax.vmap(jax.grad(example_loss), (None, 0))(params, items)
        extra = {"value": value, "grad": grads, "value_fn": loss}
        extra = {} if name in PLAIN else {"obj_fn": loss} if name == "sophia" else extra
        updates, state = update(given, state, params, **extra)
        return optax.apply_updates(params, updates), state, value

    return step


def rounded(tree: Any, dtype: Any, offset: Any) -> Any:
    """Rounds each leaf at a scale near its RMS; other offsets round otherwise."""

    def one(x: Any) -> Any:
        if not x.size or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        finite = jnp.where(jnp.isfinite(x), x, 0)
        size = jnp.sqrt(jnp.mean(jnp.square(finite / (jnp.max(jnp.abs(finite)) + 1e-37))))
        scale = jnp.exp2(jnp.round(jnp.log2(size * jnp.max(jnp.abs(finite)) + 1e-37))) * offset
        return (x / scale).astype(dtype).astype(x.dtype) * scale

    return jax.tree.map(one, tree)


def losses(step: Callable[..., Any], params: Any, state: Any, batch: Any) -> np.ndarray:
    found = []
    for _ in range(TURNS):
        params, state, loss = step(params, state, batch)
        found.append(loss)
    return np.asarray([float(to_array(x)) for x in jax.device_get(found)])


@pytest.mark.slow
@pytest.mark.filterwarnings('ignore:"seed" is deprecated:DeprecationWarning')  # dpsgd has no key
@pytest.mark.parametrize("name", optimizers())
def test_training_in_float16_follows_float32(name: str) -> None:
    params, batch = problem()
    optimizer = optimizers()[name]()
    step, state = optimizer_step(name, optimizer), optimizer.init(params)
    plain = losses(jax.jit(step), params, state, batch)
    assert plain[-20:].mean() < 0.9 * plain[0], "the plain program trains"

    @jax.jit
    def storing(params: Any, state: Any, batch: Any, offset: Any) -> Any:
        *kept, loss = step(params, state, batch)
        return *rounded(tuple(kept), jnp.float16, offset), loss

    stored = [
        losses(lambda *args, o=o: storing(*args, o), params, state, batch)
        for o in np.asarray([1.0, 1.25, 1.5, 1.75], np.float32)
    ]
    scaled = as_scaled((params, state, batch), dtype=jnp.float16)
    found = losses(jax.jit(scalify(step)), *scaled)
    assert np.all(np.isfinite(found))
    # Means over 20 steps, since two runs that follow each other swing apart.
    windows = [np.asarray(x).reshape(-1, 20).mean(1) for x in (plain, found, *stored)]
    apart = np.max([np.abs(w - windows[0]) for w in windows[2:]], axis=0)
    bound = 3 * np.maximum.accumulate(apart) + 0.02 * windows[0]
    assert np.all(np.abs(windows[1] - windows[0]) <= bound), (windows[:2], bound)

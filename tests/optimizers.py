"""Optimizers of optax that train a small regression, and `optim.scaled` for small arrays.

The first estimates of methods that find their own rate are such that the first steps are not lost
in the rounding of parameters to 16 bits.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from unitscale import optim

scaled = functools.partial(optim.scaled, min_size=0)
"""Store all arrays in narrow formats, however small."""

STEPS = 200
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 8)).astype(np.float32)
Y = np.sin(X @ (0.5 * RNG.normal(size=8))).astype(np.float32)
PARAMS = {
    "a": (0.35 * RNG.normal(size=(8, 16))).astype(np.float32),
    "b": (0.25 * RNG.normal(size=16)).astype(np.float32),
}


def loss(params: Any, batch: Any = (X, Y)) -> jax.Array:
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


class Run(NamedTuple):
    """An optimizer, further arguments of its update, and the format of weights in `scaled`."""

    make: Callable[[], Any]
    wants: tuple[str, ...] = ()
    weights: Any = "float16"

    def extra(self, value: Any, grads: Any, loss: Any) -> dict[str, Any]:
        """Return the further arguments of the update."""
        known = {"value": value, "grad": grads, "value_fn": loss, "obj_fn": loss}
        return {name: known[name] for name in self.wants}


def _sam() -> Any:
    return contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)))


# Optimizers whose only required argument is the learning rate.
RATES = {
    1e-3: "rprop simplified_ademamix",
    3e-3: "lion rmsprop sign_sgd signum",
    1e-2: """
        acprop adabelief adafactor adam adamax adamaxw adamw adan ademamix adopt amsgrad fromage
        lamb madgrad muon nadam nadamw novograd optimistic_adam_v2 radam schedule_free_adamw yogi
    """,
    0.05: "optimistic_gradient_descent",
    0.1: "adagrad schedule_free_sgd sgd sm3",
    1.0: "adadelta lars",
}
RUNS: dict[str, Run] = {
    name: Run(functools.partial(getattr(optax, name, None) or getattr(contrib, name), rate))
    for rate, names in RATES.items()
    for name in names.split()
} | {
    "adafactor, factored": Run(lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4)),
    "lbfgs": Run(optax.lbfgs, ("value", "grad", "value_fn")),
    "noisy_sgd": Run(lambda: optax.noisy_sgd(0.05, key=0)),
    "polyak_sgd": Run(optax.polyak_sgd, ("value",)),
    "rmsprop, bias correction": Run(lambda: optax.rmsprop(3e-3, bias_correction=True)),
    "rmsprop, centred": Run(lambda: optax.rmsprop(3e-3, centered=True)),
    "rmsprop, momentum": Run(lambda: optax.rmsprop(3e-3, centered=True, momentum=0.9)),
    "sgd, momentum": Run(lambda: optax.sgd(0.05, momentum=0.9)),
    "sgd, nesterov": Run(lambda: optax.sgd(0.05, momentum=0.9, nesterov=True)),
    "cocob": Run(contrib.cocob),
    "dadapt_adamw": Run(lambda: contrib.dadapt_adamw(estim_lr0=1e-3), weights=None),
    "dog": Run(lambda: contrib.dog(1.0, init_step=("heuristic", 1e-2)), weights=None),
    "dowg": Run(lambda: contrib.dowg(1.0, init_estim_sq_dist=1e-2), weights=None),
    "galore": Run(lambda: contrib.galore(1e-2, rank=4)),
    "mechanize": Run(lambda: contrib.mechanize(optax.sgd(0.1), s_init=1e-2), weights=None),
    "momo": Run(contrib.momo, ("value",)),
    "momo_adam": Run(contrib.momo_adam, ("value",)),
    "prodigy": Run(lambda: contrib.prodigy(1.0, estim_lr0=1e-3), weights=None),
    "sam": Run(_sam),
    "schedule_free": Run(lambda: contrib.schedule_free(optax.sgd(0.1), 0.1)),
    "sophia": Run(lambda: contrib.sophia(1e-2), ("obj_fn",)),
    "split_real_and_imaginary": Run(lambda: contrib.split_real_and_imaginary(optax.adam(1e-2))),
}

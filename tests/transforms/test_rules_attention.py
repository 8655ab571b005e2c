"""cuDNN's attention, whose kernel a scalified program keeps: with a reference in its place."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

from unitscale import ScaledArray, as_scaled, to_array
from unitscale.core import cudnn_of
from unitscale.transforms import scalify

SHAPE = (2, 16, 3, 8)  # batch, time, heads, features


def _weights(q: Any, k: Any, bias: Any, scale: float, mask_type: Any) -> Any:
    q, k, bias = (x.astype(jnp.float32) for x in (q, k, bias))
    logits = scale * jnp.einsum("bthd,bshd->bhts", q, k) + (bias if bias.size else 0)
    if mask_type.name == "CAUSAL":
        logits = jnp.where(jnp.tri(*logits.shape[-2:]) > 0, logits, -jnp.inf)
    return logits, jax.nn.softmax(logits)


def _forward(q, k, v, bias, *_, scale, mask_type, is_training, **__):
    logits, weights = _weights(q, k, bias, scale, mask_type)
    out = jnp.einsum("bhts,bshd->bthd", weights, v.astype(jnp.float32)).astype(q.dtype)
    return [out, jax.nn.logsumexp(logits, -1)] if is_training else [out]


def _backward(q, k, v, bias, *rest, scale, mask_type, variadic_args, **_):
    statistics, out, cotangent = (x.astype(jnp.float32) for x in rest[-3:])
    logits, _ = _weights(q, k, bias, scale, mask_type)
    weights = jnp.exp(logits - statistics[..., None])
    q32, k32, v32 = (x.astype(jnp.float32) for x in (q, k, v))
    of_v = jnp.einsum("bhts,bthd->bshd", weights, cotangent)
    inner = jnp.einsum("bthd,bshd->bhts", cotangent, v32)
    inner -= jnp.einsum("bthd,bthd->bht", cotangent, out)[..., None]
    of_logits = weights * inner
    of_q = scale * jnp.einsum("bhts,bshd->bthd", of_logits, k32)
    of_k = scale * jnp.einsum("bhts,bthd->bshd", of_logits, q32)
    _, has_bias_gradient = variadic_args
    of_bias = [of_logits.astype(q.dtype)] if has_bias_gradient else []
    return [*(x.astype(q.dtype) for x in (of_q, of_k, of_v)), *of_bias]


@pytest.fixture(scope="module", autouse=True)
def reference() -> Iterator[None]:
    """Gives the kernels a lowering for the CPU."""
    x = jnp.ones(SHAPE, jnp.bfloat16)
    found: dict[str, Any] = {}

    def collect(jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            found[eqn.primitive.name] = eqn.primitive
            for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "jaxpr")):
                if hasattr(inner, "jaxpr"):
                    collect(inner.jaxpr)

    with cudnn_of((9, 0), 91200):
        collect(jax.make_jaxpr(jax.grad(lambda x: attend(x, x, x).sum()))(x).jaxpr)
        for name, function in (("fwd", _forward), ("bwd", _backward)):
            primitive = found[f"dot_product_attention_{name}_wrapper"]
            lowering = mlir.lower_fun(function, multiple_results=True)
            mlir.register_lowering(primitive, lowering, platform="cpu")
        yield


def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)


def plain(q: Any, k: Any, v: Any, **options: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, implementation="xla", **options)


def program(attention: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def loss(w: Any, x: Any, r: Any) -> Any:
        q, k, v = (x @ u for u in w)
        out = attention(q, 2.0 * k + 0.01, v, **options)
        return jnp.sum(out * r), out

    return jax.grad(loss, has_aux=True)


MASK = jnp.asarray(np.random.default_rng(3).random((2, 1, 16, 16)) < 0.7).at[..., 0].set(True)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.25},
    "mask": {"mask": MASK},
}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("sizes", [(1.0, 1.0), (2.0**-12, 2.0**10), (2.0**9, 2.0**-14)])
@pytest.mark.parametrize("name", OPTIONS)
def test_values_and_gradients(name: str, sizes: tuple[float, float], dtype: Any) -> None:
    rng = np.random.default_rng(0)
    of_w, of_x = sizes
    w, x, r = (
        jnp.asarray(n * rng.normal(size=s), jnp.float32)
        for n, s in ((of_w, (3, 8, 8)), (of_x, SHAPE), (1e-4, SHAPE))
    )
    given = as_scaled((w, x, r), dtype=dtype)
    compiled = jax.jit(scalify(program(attend, **OPTIONS[name])))
    found = to_array(compiled(*given), jnp.float32)
    expected = program(plain, **OPTIONS[name])(*to_array(given, jnp.float32))
    step = float(jnp.finfo(dtype).eps)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=8 * step * np.abs(e).max())


def test_the_kernel_takes_the_data_of_the_operands() -> None:
    """Scales of q and k are multiplied in, that of v is the result's."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=SHAPE), jnp.float16) for _ in range(3))
    given = [ScaledArray(x, jnp.float32(s)) for x, s in ((q, 2.0), (k, 0.5), (v, 2.0**30))]
    found = jax.jit(scalify(attend))(*given)
    np.testing.assert_allclose(
        found.value, plain(*(g.value for g in given)), rtol=0, atol=2.0**30 * 4e-3
    )
    with pytest.raises(NotImplementedError, match="takes 16 bits"):
        scalify(attend)(*as_scaled((q, k, v), dtype=jnp.float32))

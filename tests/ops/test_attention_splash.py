"""JAX's kernel for TPUs: interpreted it is plain attention, and it is lowered where it is taken."""

from contextlib import nullcontext
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from tests.parallel.devices import explicit_mesh, mesh_of
from unitscale import ops
from unitscale.ops import attention_path
from unitscale.ops._attention_kernels import splash
from unitscale.ops._attention_path import tracing

TIME, SIZE = 128, 16
LONG = (2, 256, 8, 64)


def operands(kv_heads: int = 2, source: int = TIME) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = (2, TIME, 4, SIZE), (2, source, kv_heads, SIZE), (2, source, kv_heads, SIZE)
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def with_gradients(attend: Any, *args: jax.Array) -> Any:
    def loss(*args: jax.Array) -> Any:
        y = attend(*args)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*args)
    return [y, *grads]


def interpreted(is_causal: bool) -> Any:
    return lambda q, k, v: splash(q, k, v, is_causal, 0.25, interpret=True)


def assert_close(found: Any, expected: Any) -> None:
    """Results in bfloat16, of which each has a few roundings behind it."""
    for a, e in zip(found, expected, strict=True):
        e = np.asarray(e, np.float32)
        np.testing.assert_allclose(np.asarray(a, np.float32), e, atol=2.0**-6 * np.abs(e).max())


@pytest.mark.parametrize(
    ("is_causal", "kv_heads", "source"), [(True, 4, TIME), (False, 2, 2 * TIME), (True, 1, TIME)]
)
def test_values_and_gradients_are_those_of_plain_attention(
    is_causal: bool, kv_heads: int, source: int
) -> None:
    args = operands(kv_heads, source)

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, scale=0.25)

    wide = [x.astype(jnp.float32) for x in args]
    assert_close(with_gradients(interpreted(is_causal), *args), with_gradients(plain, *wide))


@pytest.mark.parametrize("make", [mesh_of, explicit_mesh])
@pytest.mark.parametrize("axes", [{"data": 2, "tensor": 2}, {"fsdp": 2, "context": 2}, {"x": 2}])
def test_each_device_has_its_part(axes: dict[str, int], make: Any) -> None:
    """Whatever divides the batch and the heads; an axis of another name divides nothing."""
    args = operands()
    expected = with_gradients(interpreted(True), *args)
    mesh = make(**axes)
    place = NamedSharding(mesh, P(next(iter(axes))))
    with jax.set_mesh(mesh):
        found = with_gradients(interpreted(True), *(jax.device_put(x, place) for x in args))
    assert_close(found, expected)


def test_under_vmap() -> None:
    q, k, v = operands()
    expected = interpreted(True)(q, k, v)
    found = jax.vmap(interpreted(True), (0, None, None))(jnp.stack([q, 2 * q]), k, v)
    assert_close([found[0]], [expected])


@pytest.mark.parametrize(
    ("q", "options", "reason"),
    [
        (LONG, {}, None),
        (LONG, {"is_causal": True}, None),
        (LONG, {"dtype": "float16"}, "it takes bfloat16, not float16"),
        ((2, 200, 8, 64), {}, "lengths that 128 divides, not 200 and 256"),
        (LONG, {"mask": True}, "no exact masks"),
        (LONG, {"dropout_rate": 0.1}, "no dropout"),
        ((2, 0, 8, 64), {}, "nothing to attend"),
    ],
)
def test_what_a_tpu_takes(q: Any, options: dict[str, Any], reason: str | None) -> None:
    options = {"dtype": "bfloat16", **options}
    with tracing(target="tpu"):
        path = attention_path(q, LONG, **options)
    assert (path.implementation == "splash") == (reason is None)
    assert (reason or "a fused kernel") in path.reason
    if reason is not None:
        with pytest.raises(ValueError, match="'splash' does not support"):
            attention_path(q, LONG, implementation="splash", **options)


def test_several_devices_need_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    path = attention_path(LONG, LONG, jnp.bfloat16)
    assert path.implementation == "plain"
    assert "devices and no mesh of jax.set_mesh" in path.reason
    with jax.set_mesh(mesh_of(data=2)):
        assert attention_path(LONG, LONG, jnp.bfloat16).implementation == "splash"
        jax.shard_map(_inside, in_specs=P("data"), out_specs=P("data"))(jnp.ones(2))


def _inside(x: jax.Array) -> jax.Array:
    path = attention_path(LONG, LONG, jnp.bfloat16)
    assert "no types inside of jax.shard_map" in path.reason
    return x


@pytest.mark.parametrize("axes", [{}, {"data": 2, "tensor": 2}], ids=str)
def test_the_op_is_lowered_for_tpus(axes: dict[str, int]) -> None:
    def grads(*args: jax.Array) -> Any:
        def loss(*args: jax.Array) -> jax.Array:
            return ops.dot_product_attention(*args, is_causal=True).value.sum()

        return jax.grad(loss, (0, 1, 2))(*args)

    with tracing(target="tpu"), jax.set_mesh(mesh_of(**axes)) if axes else nullcontext():
        exported = jax.export.export(jax.jit(grads), platforms=["tpu"])(*operands())
    assert exported.mlir_module().count("@tpu_custom_call") == 3  # forward, by q, by k and v

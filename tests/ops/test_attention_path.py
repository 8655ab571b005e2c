"""The choice of attention implementations, fused kernels, and sequences sharded over devices."""

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from recipes.bench.wire import collectives
from tests.batching import entry
from tests.parallel.devices import explicit_mesh, mesh_of
from unitscale import ops
from unitscale.core._compat import cudnn_of
from unitscale.ops import AttentionPath, attention_path, attention_paths
from unitscale.ops._attention_kernels import Window, splash
from unitscale.ops._attention_path import tracing, whole_heads

from .conformance import slow

LONG, SHORT = (2, 1024, 8, 64), (2, 96, 8, 64)
call = ops.dot_product_attention
x = np.ones((2, 8, 4, 16), jnp.bfloat16)


@contextmanager
def gpu(capability: str = "9.0", platform_version: str = "cuda 13000") -> Iterator[None]:
    """Pretend to have a Hopper GPU with cuDNN 9.12."""
    device = SimpleNamespace(compute_capability=capability)
    backend = SimpleNamespace(
        platform="gpu", platform_version=platform_version, local_devices=lambda: [device]
    )
    with pytest.MonkeyPatch.context() as patch, cudnn_of((9, 0), 91200):
        patch.setattr(jax.extend.backend, "get_backend", lambda: backend)
        patch.setattr(jax, "default_backend", lambda: "gpu")
        yield


def shaped(features: int, length: int = 96) -> tuple[int, ...]:
    return (2, length, 8, features)


# Machines by name.
MACHINES: dict[str, Callable[[], Any]] = {
    "gpu": gpu,
    "old gpu": lambda: gpu("7.5"),
    "rocm": lambda: gpu(platform_version="rocm 70000"),
    "cpu": nullcontext,
    "tpu": lambda: tracing(target="tpu"),
}
FEW, SOME = (1, 127, 2, 8), (1, 128, 2, 8)
# Machine, shapes of q and k, dtype, options, what is taken, and a part of the reason.
PATHS: list[tuple[str, tuple[int, ...], tuple[int, ...], str, dict[str, Any], str, str]] = [
    ("gpu", SHORT, SHORT, "bfloat16", {}, "cudnn", "fused kernel"),
    ("gpu", LONG, LONG, "float16", {"is_causal": True}, "cudnn", "fused kernel"),
    ("gpu", SHORT, (2, 78, 2, 64), "bfloat16", {"is_causal": True}, "cudnn", "fused"),
    ("gpu", SHORT, (2, 77, 2, 64), "bfloat16", {}, "plain", "sequence length Q 96, KV 77"),
    ("gpu", shaped(128), shaped(128), "bfloat16", {"scaled": True}, "cudnn", "fused"),
    ("gpu", SHORT, SHORT, "float16", {"scaled": True}, "plain", "may exceed the range of float16"),
    ("gpu", SHORT, SHORT, "float32", {}, "plain", "float16 and bfloat16, not float32"),
    ("gpu", LONG, LONG, "float32", {}, "chunked", "1,024 x 1,024 weights .* not float32"),
    ("gpu", SHORT, SHORT, "bfloat16", {"mask": True}, "plain", "it supports no mask"),
    ("gpu", LONG, LONG, "bfloat16", {"mask": True}, "chunked", "it supports no mask"),
    ("gpu", LONG, LONG, "bfloat16", {"is_causal": True, "local_window_size": 8}, "cudnn", "fused"),
    ("gpu", LONG, LONG, "bfloat16", {"segment_ids": True}, "cudnn", "a fused"),
    ("gpu", LONG, LONG, "bfloat16", {"local_window_size": 8}, "chunked", "only if is_causal"),
    ("gpu", LONG, LONG, "bfloat16", {"dropout_rate": 0.1}, "plain", "dropout needs all weights"),
    ("gpu", shaped(12), shaped(12), "bfloat16", {}, "plain", "multiple of 8 up to 128, not 12"),
    ("gpu", shaped(136), shaped(136), "float16", {}, "plain", "up to 128, not 136"),
    ("gpu", shaped(64, 0), SHORT, "bfloat16", {}, "plain", "an operand is empty"),
    ("gpu", LONG, LONG, "bfloat16", {"implementation": "plain"}, "plain", "requested"),
    ("gpu", SHORT, SHORT, "bfloat16", {"implementation": None}, "cudnn", "fused"),
    ("gpu", SHORT, SHORT, "bfloat16", {"implementation": "chunked"}, "chunked", "requested"),
    ("old gpu", LONG, LONG, "bfloat16", {}, "chunked", "compute capability 7.5"),
    ("old gpu", SHORT, SHORT, "bfloat16", {}, "plain", "compute capability 7.5"),
    ("rocm", SHORT, SHORT, "bfloat16", {}, "plain", "gpu, not an NVIDIA GPU"),
    ("cpu", SOME, SOME, "bfloat16", {}, "chunked", "default backend is cpu, not an NVIDIA GPU"),
    ("cpu", FEW, FEW, "bfloat16", {}, "plain", "weights per head are few"),
    ("cpu", LONG, LONG, "bfloat16", {"mask": True, "is_causal": True}, "chunked", "an NVIDIA GPU"),
    ("cpu", LONG, LONG, "bfloat16", {"dropout_rate": 0.5}, "plain", "dropout"),
    ("tpu", LONG, LONG, "bfloat16", {}, "splash", "a fused kernel"),
    ("tpu", LONG, LONG, "bfloat16", {"is_causal": True}, "splash", "a fused kernel"),
    ("tpu", LONG, LONG, "float16", {}, "chunked", "it supports bfloat16, not float16"),
    ("tpu", (2, 200, 8, 64), LONG, "bfloat16", {}, "plain", "multiples of 128, not 200 and 1024"),
    ("tpu", LONG, LONG, "bfloat16", {"mask": True}, "chunked", "it supports no mask"),
    ("tpu", LONG, LONG, "bfloat16", {"dropout_rate": 0.1}, "plain", "not support dropout"),
]


def test_paths() -> None:
    for machine, q, k, dtype, options, taken, reason in PATHS:
        with entry((machine, q, k, dtype, options)), MACHINES[machine]():
            path = attention_path(q, k, dtype, **options)
            assert path.implementation == taken
            assert re.search(reason, path.reason), path.reason
            if machine == "tpu" and taken != "splash":
                with pytest.raises(ValueError, match=f"'splash' does not support .*{reason}"):
                    attention_path(q, k, dtype, implementation="splash", **options)


def test_several_devices_of_a_tpu_need_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    path = attention_path(LONG, LONG, jnp.bfloat16)
    assert path.implementation == "chunked"
    assert "jax.set_mesh was not called" in path.reason

    def inside(x: jax.Array) -> jax.Array:
        assert "inside jax.shard_map" in attention_path(LONG, LONG, jnp.bfloat16).reason
        return x

    with jax.set_mesh(mesh_of(data=2)):
        assert attention_path(LONG, LONG, jnp.bfloat16).implementation == "splash"
        jax.shard_map(inside, in_specs=P("data"), out_specs=P("data"))(jnp.ones(2))


def test_what_jax_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If cuDNN lacks the kernel, another implementation is used, or an error raised."""

    def dot_product_attention(*args: Any, **options: Any) -> Any:
        raise NotImplementedError("needs cuDNN 99\nand more")

    with gpu():
        monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
        path = attention_path(SHORT, SHORT, "bfloat16")
        assert path.implementation == "plain"
        assert path.reason.endswith("no cuDNN: needs cuDNN 99")
        with pytest.raises(ValueError, match=r"'cudnn' does not .* needs cuDNN 99; use impl"):
            attention_path(SHORT, SHORT, "bfloat16", implementation="cudnn")


def grads_of(implementation: str, **options: Any) -> Callable[..., Any]:
    f = functools.partial(call, implementation=implementation, **options)
    return jax.grad(lambda *a: f(*a).data.astype(jnp.float32).sum(), (0, 1, 2))


def test_the_op_traces_the_kernel_forward_and_backward() -> None:
    """Trace the kernel on a machine without a GPU, as for ahead-of-time compilation."""
    args = x, *[x[:, :6, :2]] * 2
    auto = functools.partial(grads_of, "auto", is_causal=True)  # JAX traces a function once
    with cudnn_of((9, 0), 91200):
        program = str(jax.make_jaxpr(grads_of("cudnn", is_causal=True))(*args))
        with tracing(target="gpu"):
            chosen = str(jax.make_jaxpr(auto())(*args))
    for text in (program, chosen):
        assert "dot_product_attention_fwd" in text
        assert "dot_product_attention_bwd" in text
    assert "dot_product_attention_fwd" not in str(jax.make_jaxpr(auto())(*args))


def test_the_kernel_under_vmap_over_some_operands() -> None:
    def mapped(axes, *args):
        f = functools.partial(call, implementation="cudnn")
        return jax.vmap(lambda *args: f(*args).data, axes)(*args).astype(jnp.float32).sum()

    for axes in ((0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0)):
        args = [x if axis is None else np.stack([x] * 3) for axis in axes]
        with cudnn_of((9, 0), 91200):
            run = jax.grad(functools.partial(mapped, axes), (0, 1, 2))
            assert [g.shape for g in jax.eval_shape(run, *args)] == [a.shape for a in args]


def test_calls_are_listed_and_may_be_forced() -> None:
    def trace() -> None:
        # A new function each time: what JAX has traced it does not trace again.
        jax.eval_shape(lambda q: (call(q, q, q), call(q, q, q, implementation="chunked")), x)

    with attention_paths() as outer:
        trace()
        with attention_paths("plain") as inner:
            trace()
        with attention_paths("chunked"):
            trace()
    assert [path.implementation for path in inner] == ["plain", "plain"]
    taken = [path.implementation for path in outer]
    assert taken == ["plain", "chunked", "plain", "plain", "chunked", "chunked"]
    assert outer[1] == AttentionPath("chunked", "requested")
    trace()
    assert len(outer) == 6
    with attention_paths("flash"), pytest.raises(ValueError, match="got 'flash'"):  # type: ignore[arg-type]
        call(x, x, x)


def operands(kv_heads: int = 2, source: int = 128, dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = (2, 128, 4, 16), (2, source, kv_heads, 16), (2, source, kv_heads, 16)
    return [jnp.asarray(rng.normal(size=shape).astype(dtype)) for shape in shapes]


def with_gradients(attend: Any, *args: jax.Array) -> Any:
    def loss(*args: jax.Array) -> Any:
        y = attend(*args)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*args)
    return [y, *grads]


def interpreted(is_causal: bool, left: int | None = None, ids: jax.Array | None = None) -> Any:
    window = Window(left, 0 if is_causal else None)
    return lambda q, k, v: splash(q, k, v, ids, window, 0.25, interpret=True)


def assert_close(found: Any, expected: Any, tolerance: float = 2.0**-6) -> None:
    """Compare results in bfloat16 up to a few roundings."""
    for a, e in zip(found, expected, strict=True):
        e = np.asarray(e, np.float32)
        np.testing.assert_allclose(np.asarray(a, np.float32), e, atol=tolerance * np.abs(e).max())


@functools.cache
def of_one_device() -> Any:
    return with_gradients(interpreted(True), *operands())


IDS = jnp.repeat(jnp.arange(4), 32)[None] + jnp.asarray([[0], [1]])
WINDOW = {"local_window_size": (20, 0), "mask": (IDS[:, :, None] == IDS[:, None])[:, None]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "shape", "options"),
    [
        ((True,), (), {}),
        ((True, 20, IDS), (), WINDOW),
        ((False,), (1, 256), {}),  # one head of keys
    ],
    ids=["causal", "window and segments", "one head"],
)
def test_splash_is_plain_attention(ours: Any, shape: Any, options: Any) -> None:
    plain = functools.partial(
        jax.nn.dot_product_attention, is_causal=ours[0], scale=0.25, **options
    )
    args = operands(*shape)
    expected = with_gradients(plain, *(x.astype(jnp.float32) for x in args))
    assert_close(with_gradients(interpreted(*ours), *args), expected)


@pytest.mark.slow
def test_splash_under_vmap() -> None:
    q, k, v = operands()
    found = jax.jit(jax.vmap(interpreted(True), (0, None, None)))(jnp.stack([q, 2 * q]), k, v)
    assert_close([found[0]], of_one_device()[:1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "axes"),
    [
        (mesh_of, {"data": 2, "tensor": 2}),
        (explicit_mesh, {"fsdp": 2, "context": 2}),
        (explicit_mesh, {"x": 2}),
    ],
)
def test_splash_on_each_device(axes: dict[str, int], make: Any) -> None:
    """Batch and heads may be sharded over any known axes; other axes do not matter."""
    args = operands()
    mesh = make(**axes)
    place = NamedSharding(mesh, P(next(iter(axes))))
    with jax.set_mesh(mesh):
        found = with_gradients(interpreted(True), *(jax.device_put(x, place) for x in args))
    assert_close(found, of_one_device())


@pytest.mark.parametrize("axes", [{}, {"data": 2, "tensor": 2}], ids=str)
def test_the_op_is_lowered_for_tpus(axes: dict[str, int]) -> None:
    grads = jax.jit(grads_of("auto", is_causal=True))
    with tracing(target="tpu"), jax.set_mesh(mesh_of(**axes)) if axes else nullcontext():
        exported = jax.export.export(grads, platforms=["tpu"])(*operands())
    assert exported.mlir_module().count("@tpu_custom_call") == 3  # forward, by q, by k and v


@pytest.mark.parametrize(
    ("axes", "kv_heads", "implementation"),
    [
        ({"context": 4}, 4, "chunked"),
        ({"data": 2, "context": 2}, 1, "plain"),
        slow({"context": 2, "tensor": 2}, 2, "plain"),
        slow({"context": 2, "tensor": 2}, 2, "chunked"),
    ],
    ids=str,
)
def test_tokens_over_devices(axes: dict[str, int], kv_heads: int, implementation: str) -> None:
    def attend(*args: jax.Array) -> jax.Array:
        return call(*args, is_causal=True, implementation=implementation).value

    args = [a[:, :16] for a in operands(kv_heads, dtype=jnp.float32)]
    expected = with_gradients(attend, *args)
    mesh = mesh_of(**axes)
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, P("data" if "data" in axes else None, "context"))
        placed = [jax.device_put(x, place) for x in args]
        program = jax.jit(attend).lower(*placed).compile()
        found = with_gradients(attend, *placed)
    assert_close(found, expected, 1e-4)
    if axes == {"context": 4} and implementation == "chunked":
        assert {c.kind for c in collectives(program)} == {"all-to-all"}


def test_heads_are_moved_where_devices_divide_them() -> None:
    assert whole_heads(8, 8) is None
    with jax.set_mesh(mesh_of(context=2, tensor=2)):
        assert [whole_heads(8, n) for n in (8, 4, 2)] == [True, True, False]
    shape = (2, 64, 6, 64)
    with tracing(target="gpu"), jax.set_mesh(mesh_of(context=4)):
        path = ops.attention_path(shape, shape, jnp.bfloat16, is_causal=True)
        assert path.implementation != "cudnn"
        assert "context and tensor do not divide 6 query heads" in path.reason

"""Which implementation a call of attention takes: the table, and that the op follows it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from unitscale import ops
from unitscale.core import ScaledArray
from unitscale.core._compat import cudnn_of
from unitscale.ops import AttentionPath, _attention_path as paths, attention_path, attention_paths

LONG = (2, 1024, 8, 64)
SHORT = (2, 96, 8, 64)


@contextmanager
def gpu(capability: str = "9.0", platform_version: str = "cuda 13000") -> Iterator[None]:
    """Lets the rule find a GPU that is not there; JAX is told of a Hopper with cuDNN 9.12."""
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


# Shapes of q and k, dtype, options, what is taken on a GPU, and a part of the reason.
ON_GPU: list[tuple[tuple[int, ...], tuple[int, ...], str, dict[str, Any], str, str]] = [
    (SHORT, SHORT, "bfloat16", {}, "cudnn", "fused kernel"),
    (LONG, LONG, "float16", {"is_causal": True}, "cudnn", "fused kernel"),
    (SHORT, (2, 78, 2, 64), "bfloat16", {"is_causal": True}, "cudnn", "fused"),
    (SHORT, (2, 77, 2, 64), "bfloat16", {}, "plain", "Unsupported sequence length Q 96, KV 77"),
    (shaped(8), shaped(8), "float16", {}, "cudnn", "fused"),
    (shaped(128), shaped(128), "bfloat16", {"scaled": True}, "cudnn", "fused"),
    (SHORT, SHORT, "float16", {"scaled": True}, "plain", "scales of q and k may leave"),
    (SHORT, SHORT, "float32", {}, "plain", "float16 and bfloat16, not float32"),
    (LONG, LONG, "float32", {}, "chunked", "1,024 x 1,024 weights .* not float32"),
    (SHORT, SHORT, "float64", {}, "plain", "not float64"),
    (SHORT, SHORT, "bfloat16", {"mask": True}, "plain", "no exact masks but the causal one"),
    (LONG, LONG, "bfloat16", {"mask": True}, "chunked", "no exact masks"),
    (LONG, LONG, "bfloat16", {"dropout_rate": 0.1}, "plain", "dropout needs all weights"),
    (shaped(12), shaped(12), "bfloat16", {}, "plain", "8 divides, up to 128, not 12"),
    (shaped(136), shaped(136), "bfloat16", {}, "plain", "up to 128, not 136"),
    (shaped(64, 0), SHORT, "bfloat16", {}, "plain", "nothing to attend"),
    (LONG, LONG, "bfloat16", {"implementation": "plain"}, "plain", "asked for"),
    (SHORT, SHORT, "bfloat16", {"implementation": "xla"}, "plain", "asked for"),
    (SHORT, SHORT, "bfloat16", {"implementation": None}, "cudnn", "fused"),
    (SHORT, SHORT, "bfloat16", {"implementation": "chunked"}, "chunked", "asked for"),
]


@pytest.mark.parametrize(("q", "k", "dtype", "options", "taken", "reason"), ON_GPU)
def test_on_an_nvidia_gpu(q, k, dtype, options, taken, reason) -> None:
    with gpu():
        path = attention_path(q, k, dtype, **options)
    assert path.implementation == taken
    assert re.search(reason, path.reason), path.reason


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (lambda: gpu("7.5"), "compute capability 7.5"),
        (lambda: gpu(platform_version="rocm 70000"), "default backend is gpu, no NVIDIA GPU"),
    ],
    ids=["old", "not NVIDIA"],
)
def test_on_other_gpus(fake: Callable[[], Any], reason: str) -> None:
    with fake():
        assert attention_path(LONG, LONG, "bfloat16").implementation == "chunked"
        path = attention_path(SHORT, SHORT, "bfloat16")
    assert path.implementation == "plain"
    assert reason in path.reason


@pytest.mark.parametrize(
    ("time", "source", "options", "taken"),
    [
        (128, 128, {}, "chunked"),
        (127, 128, {}, "plain"),
        (1, 4096, {"mask": True}, "plain"),
        (64, 256, {"mask": True, "is_causal": True}, "chunked"),
        (4096, 4096, {"dropout_rate": 0.5}, "plain"),
    ],
)
def test_on_a_cpu(time: int, source: int, options: dict[str, Any], taken: str) -> None:
    path = attention_path((1, time, 2, 8), (1, source, 2, 8), "bfloat16", **options)
    assert path.implementation == taken
    assert "default backend is cpu, no NVIDIA GPU" in path.reason


def test_what_jax_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of cuDNN that lacks the kernel: the other path, or an error, never the kernel."""

    def dot_product_attention(*args: Any, **options: Any) -> Any:
        raise NotImplementedError("needs cuDNN 99\nand more")

    with gpu():
        monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
        path = attention_path(SHORT, SHORT, "bfloat16")
        assert path.implementation == "plain"
        assert path.reason.endswith("no cuDNN: needs cuDNN 99")
        with pytest.raises(ValueError, match=r"'cudnn' does not .* needs cuDNN 99; use impl"):
            attention_path(SHORT, SHORT, "bfloat16", implementation="cudnn")


x = jnp.ones((2, 8, 4, 16), jnp.bfloat16)
call = ops.dot_product_attention
MASK = jnp.ones((8, 8), bool)
DROPOUT: dict[str, Any] = {
    "dropout_rate": 0.1,
    "dropout_key": jax.random.key(0),
    "deterministic": False,
}
ERRORS = [
    (
        lambda: call(x, x, x, implementation="flash"),
        "one of auto, plain, chunked, cudnn, splash; got 'fl",
    ),
    (lambda: call(x, x, x, implementation="cudnn", mask=MASK), "no exact masks"),
    (
        lambda: call(x, x, x, implementation="cudnn", **DROPOUT),
        "'cudnn' does not support this call: it has no dropout",
    ),
    (
        lambda: call(x, x, x, implementation="chunked", **DROPOUT),
        "'chunked' does not support this call: dropout needs all weights at once",
    ),
    (lambda: call(*[x.astype("float32")] * 3, implementation="cudnn"), "not float32"),
    (lambda: call(*[x[..., :12]] * 3, implementation="cudnn"), "head sizes that 8 divides"),
    (
        lambda: call(
            ScaledArray(x.astype("float16"), 2.0),
            *[x.astype("float16")] * 2,
            implementation="cudnn",
        ),
        "scales of q and k",
    ),
]


@pytest.mark.parametrize(("f", "match"), ERRORS)
def test_errors(f: Callable[[], Any], match: str) -> None:
    with cudnn_of((9, 0), 91200), pytest.raises(ValueError, match=match):
        f()


def primitives(f: Callable[..., Any], *args: Any) -> str:
    return str(jax.make_jaxpr(f)(*args))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_op_traces_the_kernel_forward_and_backward(dtype: str) -> None:
    """On this machine without a GPU, as for a program that is compiled ahead of time."""

    def grads(q, k, v, implementation):
        def f(q, k, v):
            y = call(q, k, v, is_causal=True, implementation=implementation).data
            return y.astype(jnp.float32).sum()

        return jax.grad(f, (0, 1, 2))(q, k, v)

    args = x.astype(dtype), *[x[:, :6, :2].astype(dtype)] * 2
    with cudnn_of((9, 0), 91200):
        program = primitives(lambda *args: grads(*args, "cudnn"), *args)
        shapes = jax.eval_shape(lambda *args: grads(*args, "cudnn"), *args)
        with paths.tracing(target="gpu"):
            chosen = primitives(lambda *args: grads(*args, "auto"), *args)
    assert [s.shape for s in shapes] == [a.shape for a in args]
    for text in (program, chosen):
        assert "dot_product_attention_fwd" in text
        assert "dot_product_attention_bwd" in text
    assert "dot_product_attention_fwd" not in primitives(lambda *args: grads(*args, "auto"), *args)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0)])
def test_the_kernel_under_vmap_over_some_operands(axes: tuple[int | None, ...]) -> None:
    def mapped(*args):
        f = functools.partial(call, implementation="cudnn")
        return jax.vmap(lambda *args: f(*args).data, axes)(*args).astype(jnp.float32).sum()

    args = [x if axis is None else jnp.stack([x] * 3) for axis in axes]
    with cudnn_of((9, 0), 91200):
        grads = jax.eval_shape(jax.grad(mapped, (0, 1, 2)), *args)
    assert [g.shape for g in grads] == [a.shape for a in args]


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
    assert outer[1] == AttentionPath("chunked", "asked for")
    trace()
    assert len(outer) == 6


def test_an_unknown_one_cannot_be_forced() -> None:
    with attention_paths("flash"), pytest.raises(ValueError, match="got 'flash'"):  # type: ignore[arg-type]
        call(x, x, x)

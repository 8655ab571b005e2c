"""Select the implementation of attention, and report which one a call uses and why."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp

from ..core import CONTEXT_AXES, TENSOR_AXES, axes_size, check_choice, gpu_capability

Implementation = Literal["auto", "plain", "chunked", "cudnn", "splash"]
"""Implementations of `dot_product_attention`."""

HEAD_AXES = (*TENSOR_AXES, *CONTEXT_AXES)
"""Mesh axes that shard the heads when each device has all tokens of its heads."""
LANES = 128
"""Vector lanes of a TPU. Splash supports sequence lengths that are multiples of it."""
_LONG = {"cpu": 128 * 128}
_LONG_ELSEWHERE = 1024 * 1024
_MOST_FEATURES = 128
_NAME = "unitscale.ops.dot_product_attention"


class AttentionPath(NamedTuple):
    """The implementation that a call of `dot_product_attention` uses, and why.

    Attributes:
        implementation: "plain", "chunked", "cudnn" or "splash".
        reason: why it was selected, in one line.
    """

    implementation: Implementation
    reason: str


class _Tracing(NamedTuple):
    forced: Implementation = "auto"
    target: str | None = None
    taken: tuple[list[AttentionPath], ...] = ()


_TRACING: ContextVar[_Tracing] = ContextVar("attention", default=_Tracing())  # noqa: B039


def attention_path(
    q_shape: Any,
    k_shape: Any,
    dtype: Any,
    *,
    mask: bool = False,
    is_causal: bool = False,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: bool = False,
    dropout_rate: float = 0.0,
    scaled: bool = False,
    implementation: Implementation | Literal["xla"] | None = "auto",
) -> AttentionPath:
    """Return the implementation that a call of `dot_product_attention` uses, and why.

    "auto" selects the first of these that supports the call. The fused kernels, "cudnn" and
    "splash", support causal masks, windows and segments, but no other mask and no dropout, and
    need whole heads on each device.

    - "cudnn", on NVIDIA GPUs of compute capability 8.0 or more: 16-bit operands (not float16 if q
      or k has a scale), even lengths, head sizes 8, 16, ..., 128; a window only if causal.
    - "splash", on TPUs: bfloat16, lengths that are multiples of 128; not inside `jax.shard_map`,
      and with several devices only inside `jax.set_mesh`.
    - "chunked": no dropout; at least 128 x 128 weights per head on a CPU, else 1,024 x 1,024.
    - "plain": everything else.

    Args:
        q_shape: (batch, time, heads, d), or q itself.
        k_shape: (batch, source, kv_heads, d), or k itself.
        dtype: promoted dtype of q, k and v.
        mask: whether the call passes a mask.
        is_causal: as for `dot_product_attention`.
        local_window_size: as for `dot_product_attention`.
        segment_ids: whether the call passes segment ids.
        dropout_rate: dropout rate of the attention weights.
        scaled: whether q or k is a ScaledArray with a scale.
        implementation: as for `dot_product_attention`.
    """
    dtype = jnp.dtype(getattr(dtype, "dtype", dtype))
    q_shape, k_shape = (tuple(getattr(x, "shape", x)) for x in (q_shape, k_shape))
    settings = _TRACING.get()
    wanted: Any = {None: "auto", "xla": "plain"}.get(implementation, implementation)
    wanted = wanted if settings.forced == "auto" else settings.forced
    check_choice(_NAME, "implementation", wanted, Implementation)
    no_chunks = "dropout needs all weights at once" if dropout_rate else None

    def refusal_of(name: str) -> str | None:
        if name in ("plain", "chunked"):
            return no_chunks if name == "chunked" else None
        refusal = _not_for_kernels(q_shape, k_shape, mask, dropout_rate)
        if name == "splash":
            return refusal or _not_for_splash(q_shape[1], k_shape[1], dtype)
        if refusal is None and local_window_size is not None and not is_causal:
            refusal = "it supports a window only if is_causal=True"
        return refusal or _not_for_cudnn(q_shape, k_shape, dtype, is_causal, scaled)

    if wanted != "auto":
        if (refusal := refusal_of(wanted)) is not None:
            raise ValueError(
                f"{_NAME}: implementation {wanted!r} does not support this call: "
                f'{refusal.rstrip(".")}; use implementation="auto".'
            )
        return AttentionPath(wanted, "requested")
    kernel, name = ("splash", "splash") if target() == "tpu" else ("cudnn", "cuDNN")
    missing = _unknown_devices() if kernel == "splash" else None if settings.target else _no_gpu()
    refusal = missing or refusal_of(kernel)
    if refusal is None:
        return AttentionPath(kernel, "a fused kernel for this device")
    time, source = q_shape[1], k_shape[1]
    is_long = time * source >= _LONG.get(target(), _LONG_ELSEWHERE)
    size = f"{time:,} x {source:,} weights per head are {'many' if is_long else 'few'}"
    chosen = "chunked" if is_long and no_chunks is None else "plain"
    return AttentionPath(chosen, f"{no_chunks or size}; no {name}: {refusal}")


@contextmanager
def attention_paths(implementation: Implementation = "auto") -> Iterator[list[AttentionPath]]:
    """Record the `AttentionPath` of each attention call that is traced in a ``with`` block.

    Args:
        implementation: if not "auto", every call inside the block uses it.

    Example:
        >>> from unitscale import ops
        >>> x = jnp.ones((1, 8, 2, 4))
        >>> with ops.attention_paths() as taken:
        ...     y = jax.eval_shape(ops.dot_product_attention, x, x, x)
        >>> taken[0].implementation
        'plain'
    """
    taken: list[AttentionPath] = []
    with tracing(forced=implementation, taken=(*_TRACING.get().taken, taken)):
        yield taken


@contextmanager
def tracing(**changes: Any) -> Iterator[None]:
    """Change settings inside a ``with`` block: target="gpu" traces as for an NVIDIA GPU."""
    token = _TRACING.set(_TRACING.get()._replace(**changes))
    try:
        yield
    finally:
        _TRACING.reset(token)


def take_path(*args: Any, **kwargs: Any) -> Implementation:
    """Return the implementation of `attention_path`, and record it for `attention_paths`."""
    path = attention_path(*args, **kwargs)
    for taken in _TRACING.get().taken:
        taken.append(path)
    return path.implementation


def target() -> str:
    """Return the platform that programs are traced for: "cpu", "gpu" or "tpu"."""
    return _TRACING.get().target or jax.default_backend()


def whole_heads(*heads: int) -> bool | None:
    """Return whether the heads can be sharded evenly; None if no mesh axis shards the tokens."""
    if axes_size(CONTEXT_AXES) == 1:
        return None
    return all(n % axes_size(HEAD_AXES) == 0 for n in heads)


def _no_gpu() -> str | None:
    """Explain why the default backend lacks cuDNN's attention kernel; None if it has it."""
    capability = gpu_capability()
    if capability is None:
        platform = jax.extend.backend.get_backend().platform
        return f"the default backend is {platform}, not an NVIDIA GPU"
    return None if capability >= 8 else f"this GPU has compute capability {capability} < 8.0"


def _unknown_devices() -> str | None:
    if not jax.sharding.get_abstract_mesh().empty or _TRACING.get().target == "tpu":
        return None
    count = jax.device_count()
    return None if count == 1 else f"there are {count} devices, and jax.set_mesh was not called"


def _not_for_kernels(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], mask: bool, dropout_rate: float
) -> str | None:
    if dropout_rate:
        return "it does not support dropout here"
    if mask:
        # A row with all keys masked has had NaN gradients in some versions of cuDNN.
        return "it supports no mask; pass is_causal, local_window_size or segment_ids instead"
    if 0 in (*q_shape, *k_shape):
        return "an operand is empty"
    if whole_heads(q_shape[-2], k_shape[-2]) is False:
        return (
            "each device needs whole heads, and the devices of the mesh axes context and tensor do "
            f"not divide {q_shape[-2]} query heads and {k_shape[-2]} key heads evenly"
        )
    return None


def _not_for_splash(time: int, source: int, dtype: Any) -> str | None:
    if target() != "tpu":
        return f"it needs a TPU, not a {target()}"
    if dtype != jnp.bfloat16:
        return f"it supports bfloat16, not {dtype}"
    if time % LANES or source % LANES:
        return f"lengths must be multiples of {LANES}, not {time} and {source}"
    if jax.sharding.get_abstract_mesh().manual_axes:
        return "it does not work inside jax.shard_map"
    return None


def _not_for_cudnn(
    q_shape: Any, k_shape: Any, dtype: Any, is_causal: bool, scaled: bool
) -> str | None:
    features = q_shape[-1]
    if dtype not in (jnp.float16, jnp.bfloat16):
        return f"it supports float16 and bfloat16, not {dtype}"
    if dtype == jnp.float16 and scaled:
        return "q and k times their scales may exceed the range of float16"
    if features % 8 or features > _MOST_FEATURES:
        return f"the head size must be a multiple of 8 up to {_MOST_FEATURES}, not {features}"

    attend = partial(jax.nn.dot_product_attention, is_causal=is_causal, implementation="cudnn")
    q, k = (jax.ShapeDtypeStruct(shape, dtype) for shape in (q_shape, k_shape))
    try:  # JAX checks that the installed cuDNN and the GPU support training
        jax.eval_shape(lambda *args: jax.vjp(attend, *args)[0], q, k, k)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return None

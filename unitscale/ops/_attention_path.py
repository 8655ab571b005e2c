"""Which implementation a call of attention takes, and why: one rule, for callers and for the op."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.extend
import jax.numpy as jnp

from ._attention_splash import LANES
from ._context_axis import whole_heads

Implementation = Literal["auto", "plain", "chunked", "cudnn", "splash"]
"""Of `dot_product_attention`."""

_LONG = {"cpu": 128 * 128}
_LONG_ELSEWHERE = 1024 * 1024
_MOST_FEATURES = 128
_NAME = "unitscale.ops.dot_product_attention"


class AttentionPath(NamedTuple):
    """What a call of `dot_product_attention` takes, and why.

    Attributes:
        implementation: "plain", "chunked", "cudnn" or "splash".
        reason: one line for people.

    Example:
        >>> AttentionPath("plain", "asked for").implementation
        'plain'
    """

    implementation: Implementation
    reason: str


class _Tracing(NamedTuple):
    """What holds where a program is traced; never changed in place."""

    forced: Implementation = "auto"
    target: str | None = None
    taken: tuple[list[AttentionPath], ...] = ()


_NOTHING = _Tracing()
_TRACING: ContextVar[_Tracing] = ContextVar("attention", default=_NOTHING)


def attention_path(
    q_shape: Any,
    k_shape: Any,
    dtype: Any,
    *,
    mask: bool = False,
    is_causal: bool = False,
    dropout_rate: float = 0.0,
    scaled: bool = False,
    implementation: Implementation | Literal["xla"] | None = "auto",
) -> AttentionPath:
    """Says which implementation a call of `dot_product_attention` takes, and why.

    "auto" is "cudnn", the fused kernel, where the default backend is an NVIDIA GPU and the kernel
    takes the call: 16-bit operands, head sizes that 8 divides up to 128, even lengths, no mask but
    the causal one, no dropout, and, under a mesh whose axis context divides the tokens, heads that
    the devices of context and tensor divide.

    It is "splash", JAX's kernel for TPUs, where the default backend is one and the call fits
    likewise: bfloat16, lengths that 128 divides, and for several devices the mesh of
    `jax.set_mesh`, which divides the batch and the heads; not inside of `jax.shard_map`.

    Else it is "chunked" for long sequences without dropout: from 128 queries times 128 keys on
    where the default backend is a CPU, on which that was measured to be faster, and from
    1,024 x 1,024 on elsewhere, to save memory. Else it is "plain".

    Args:
        q_shape: (batch, time, heads, d), or q itself.
        k_shape: (batch, source, kv_heads, d), or k itself.
        dtype: that q, k and v have in common; 8-bit data counts as bfloat16.
        mask: whether there is one.
        is_causal: as for the op.
        dropout_rate: of the weights, 0 where dropout is off.
        scaled: whether q or k is a ScaledArray that has a scale.
        implementation: as for the op.

    Returns:
        `AttentionPath`, the implementation and the reason.

    Raises:
        ValueError: if the implementation is unknown, or one was asked for that cannot be had.

    Example:
        >>> shape = (1, 4096, 8, 64)
        >>> attention_path(shape, shape, "float32").implementation
        'chunked'
    """
    dtype = jnp.dtype(getattr(dtype, "dtype", dtype))
    q_shape, k_shape = (tuple(getattr(x, "shape", x)) for x in (q_shape, k_shape))
    tracing = _TRACING.get()
    wanted: Any = {None: "auto", "xla": "plain"}.get(implementation, implementation)
    wanted = wanted if tracing.forced == "auto" else tracing.forced
    if wanted not in get_args(Implementation):
        raise ValueError(
            f"{_NAME}: implementation must be one of {', '.join(get_args(Implementation))}; got "
            f"{wanted!r}"
        )
    whole = "dropout needs all weights at once" if dropout_rate else None

    def no_cudnn() -> str | None:
        return _not_for_cudnn(q_shape, k_shape, dtype, mask, is_causal, dropout_rate, scaled)

    def no_splash() -> str | None:
        return _not_for_splash(q_shape, k_shape, dtype, mask, dropout_rate)

    if wanted != "auto":
        refusal = {
            "plain": lambda: None,
            "chunked": lambda: whole,
            "cudnn": no_cudnn,
            "splash": no_splash,
        }[wanted]()
        if refusal is not None:
            raise ValueError(
                f"{_NAME}: implementation {wanted!r} was asked for, and cannot be had: "
                f'{refusal.rstrip(".")}; use implementation="auto", which takes another one.'
            )
        return AttentionPath(wanted, "asked for")
    if target() == "tpu":
        kernel, refusal = "splash", _unknown_devices() or no_splash()
        if refusal is None:
            return AttentionPath("splash", "a fused kernel of JAX for the TPU")
    else:
        kernel, refusal = "cuDNN", (None if tracing.target else _no_gpu()) or no_cudnn()
        if refusal is None:
            return AttentionPath("cudnn", "a fused kernel of the NVIDIA GPU")
    time, source = q_shape[1], k_shape[1]
    if whole is None and time * source >= _LONG.get(target(), _LONG_ELSEWHERE):
        reason = f"{time:,} x {source:,} weights of a head are not held at once"
        return AttentionPath("chunked", f"{reason}; no {kernel}: {refusal}")
    reason = whole or f"{time:,} x {source:,} weights of a head are few"
    return AttentionPath("plain", f"{reason}; no {kernel}: {refusal}")


@contextmanager
def attention_paths(implementation: Implementation = "auto") -> Iterator[list[AttentionPath]]:
    """Lists which implementations the calls of attention take that are traced within the block.

    What JAX has traced before, for the same shapes, it does not trace again.

    Args:
        implementation: what every call within the block takes, whatever it asks for; "auto" leaves
            them as they are.

    Yields:
        The list, one `AttentionPath` a call, which grows as calls are traced.

    Example:
        >>> from unitscale import ops
        >>> x = jnp.ones((1, 8, 2, 4))
        >>> with ops.attention_paths() as taken:
        ...     y = jax.eval_shape(ops.dot_product_attention, x, x, x)
        >>> taken[0].implementation
        'plain'
    """
    taken: list[AttentionPath] = []
    with _tracing(forced=implementation, taken=(*_TRACING.get().taken, taken)):
        yield taken


@contextmanager
def for_nvidia() -> Iterator[None]:
    """Within the block, programs are traced as for an NVIDIA GPU, whatever this machine has."""
    with _tracing(target="gpu"):
        yield


@contextmanager
def for_tpu() -> Iterator[None]:
    """Within the block, programs are traced as for one TPU, or those of the mesh around."""
    with _tracing(target="tpu"):
        yield


@contextmanager
def _tracing(**changes: Any) -> Iterator[None]:
    token = _TRACING.set(_TRACING.get()._replace(**changes))
    try:
        yield
    finally:
        _TRACING.reset(token)


def take_path(*args: Any, **kwargs: Any) -> Implementation:
    """As `attention_path`, and notes what is taken for `attention_paths`."""
    path = attention_path(*args, **kwargs)
    for taken in _TRACING.get().taken:
        taken.append(path)
    return path.implementation


def target() -> str:
    """The platform that is traced for: "cpu", "gpu", "tpu"."""
    return _TRACING.get().target or jax.default_backend()


def _no_gpu() -> str | None:
    """Why the default backend has no kernel of cuDNN, or None."""
    backend = jax.extend.backend.get_backend()
    if "cuda" not in backend.platform_version:
        return f"the default backend is {backend.platform}, no NVIDIA GPU"
    capability = getattr(backend.local_devices()[0], "compute_capability", "8.0")
    return None if float(capability) >= 8 else f"this GPU has compute capability {capability} < 8.0"


def _not_for_cudnn(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    dtype: Any,
    mask: bool,
    is_causal: bool,
    dropout_rate: float,
    scaled: bool,
) -> str | None:
    """Why cuDNN does not take a call, wherever it runs, or None."""
    features = q_shape[-1]
    if (refusal := _not_for_kernels(q_shape, k_shape, mask, dropout_rate)) is not None:
        return refusal
    if dtype not in (jnp.float16, jnp.bfloat16):
        return f"it takes float16 and bfloat16, not {dtype}"
    if dtype == jnp.float16 and scaled:
        return "scales of q and k may leave the range of float16"
    if features % 8 or features > _MOST_FEATURES:
        return f"it takes head sizes that 8 divides, up to {_MOST_FEATURES}, not {features}"
    return _refused_by_jax(q_shape, k_shape, dtype, is_causal)


def _not_for_kernels(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], mask: bool, dropout_rate: float
) -> str | None:
    """Why no fused kernel takes a call, or None."""
    if dropout_rate:
        return "it has no dropout on the weights here"
    if mask:
        # cuDNN adds a finite number where the mask is False. What a row with nothing to attend to
        # becomes depends on the dtype then, and its gradient has been NaN in some versions.
        return "it has no exact masks but the causal one"
    if 0 in (*q_shape, *k_shape):
        return "there is nothing to attend to or from"
    if whole_heads(q_shape[-2], k_shape[-2]) is False:
        return (
            "it needs all tokens of a head, and the devices of the mesh axes context and tensor do "
            f"not divide {q_shape[-2]} heads and {k_shape[-2]} of keys and values"
        )
    return None


def _unknown_devices() -> str | None:
    """Why a program may be for several TPUs of which nothing is known while it is traced."""
    if not jax.sharding.get_abstract_mesh().empty or _TRACING.get().target == "tpu":
        return None
    count = jax.device_count()
    return None if count == 1 else f"there are {count} devices and no mesh of jax.set_mesh"


def _not_for_splash(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: Any, mask: bool, dropout_rate: float
) -> str | None:
    """Why JAX's kernel for TPUs does not take a call, or None."""
    if (refusal := _not_for_kernels(q_shape, k_shape, mask, dropout_rate)) is not None:
        return refusal
    if dtype != jnp.bfloat16:
        return f"it takes bfloat16, not {dtype}"
    if q_shape[1] % LANES or k_shape[1] % LANES:
        return f"it takes lengths that {LANES} divides, not {q_shape[1]} and {k_shape[1]}"
    if jax.sharding.get_abstract_mesh().manual_axes:
        return "its results have no types inside of jax.shard_map"
    return None


def _refused_by_jax(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: Any, is_causal: bool
) -> str | None:
    """What JAX says, which knows the installed cuDNN and the GPU, for training too; or None."""
    arguments = [jax.ShapeDtypeStruct(s, dtype) for s in (q_shape, k_shape, k_shape)]

    def differentiated(*arguments: jax.Array) -> Any:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=is_causal, implementation="cudnn"
            )

        return jax.vjp(attend, *arguments)[0]

    try:
        jax.eval_shape(differentiated, *arguments)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return None

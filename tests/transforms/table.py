"""Everyday functions: what users of `jax.numpy`, `jax.nn`, `jax.lax`, `jax.random` write.

An entry is a name, a function and its arguments. The arguments are drawn once, and scaled.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn

_RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(_RANDOM.normal(size=shape), jnp.float32)


def positive(*shape: int) -> jax.Array:
    return jnp.asarray(_RANDOM.uniform(0.5, 2.0, size=shape), jnp.float32)


def inside(*shape: int) -> jax.Array:
    return jnp.asarray(_RANDOM.uniform(-0.9, 0.9, size=shape), jnp.float32)


A, B, C, P, Q, IN = (
    normal(4, 6),
    normal(4, 6),
    normal(6, 5),
    positive(4, 6),
    positive(4, 6),
    inside(4, 6),
)
V, W, S = normal(6), normal(6), normal(4, 4)
SPD = S @ S.T + 4 * jnp.eye(4)
IMAGE, KERNEL = normal(2, 8, 8, 3), normal(3, 3, 3, 4)
IDS = jnp.asarray([0, 2, 2, 3])
MASK = jnp.asarray(_RANDOM.random((4, 6)) < 0.5)
KEY = jax.random.key(3)


class Entry(NamedTuple):
    """One function of the table; ``steps`` is the tolerance in units of float32's epsilon."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    differentiable: bool = True
    steps: float = 64.0


def _unary(module: Any, names: str, x: Any, **options: Any) -> list[Entry]:
    prefix = module.__name__.removeprefix("jax.")
    return [Entry(f"{prefix}.{n}", getattr(module, n), (x,), **options) for n in names.split()]


def _binary(module: Any, names: str, x: Any, y: Any, **options: Any) -> list[Entry]:
    prefix = module.__name__.removeprefix("jax.")
    return [Entry(f"{prefix}.{n}", getattr(module, n), (x, y), **options) for n in names.split()]


ELEMENTWISE = [
    *_unary(
        jnp, "sin cos tanh sinh cosh arctan arcsinh exp exp2 expm1 square abs negative sinc", A
    ),
    *_unary(jnp, "log log2 log10 log1p sqrt cbrt reciprocal i0", P),
    *_unary(jnp, "arcsin arccos arctanh tan", IN),
    *_unary(
        jnp, "floor ceil rint trunc sign signbit isnan isinf isfinite", A, differentiable=False
    ),
    *_unary(jnp, "deg2rad rad2deg nan_to_num conj real fabs positive", A),
    *_binary(jnp, "add subtract multiply maximum minimum logaddexp logaddexp2 hypot arctan2", A, B),
    *_binary(jnp, "divide true_divide power float_power fmod remainder copysign heaviside", P, Q),
    *_binary(
        jnp,
        "greater less equal not_equal less_equal greater_equal isclose",
        A,
        B,
        differentiable=False,
    ),
    *_binary(jnp, "floor_divide", P, Q, differentiable=False),
    Entry("jnp.clip", lambda x: jnp.clip(x, -0.5, 0.7), (A,)),
    Entry("jnp.where", lambda x, y: jnp.where(MASK, x, y), (A, B)),
    Entry("jnp.where_constant", lambda x: jnp.where(MASK, x, 0.25), (A,)),
    Entry("jnp.where_infinite", lambda x: jnp.where(MASK, x, -jnp.inf), (A,)),
    Entry("jnp.where_lowest", lambda x: jnp.where(MASK, x, jnp.finfo(x.dtype).min), (A,)),
    Entry("jnp.select", lambda x, y: jnp.select([x > 1, x > 0], [x, y], 3.0), (A, B)),
    Entry("jnp.divmod", lambda x, y: jnp.divmod(x, y)[1], (P, Q)),
    Entry("jnp.frexp", lambda x: jnp.frexp(x)[0], (A,), False),
    Entry("jnp.ldexp", lambda x: jnp.ldexp(x, 3), (A,)),
    Entry("jnp.nextafter", lambda x, y: jnp.nextafter(x, y), (A, B), False),
    Entry(
        "python operators", lambda x, y: (2 * x - y / 3 + 1) * -x + x**3 - 4 / (y * y + 1), (A, B)
    ),
    Entry("constants", lambda x: 1e-6 * x + 1e6 * x**2 - 0.1, (A,)),
    Entry("astype int", lambda x: (x * 3).astype(jnp.int32), (A,), False),
    Entry("astype bool", lambda x: x.astype(bool), (A,), False),
    Entry(
        "astype float16", lambda x: x.astype(jnp.float16).astype(jnp.float32), (A,), True, 2.0**16
    ),
    Entry("from integers", lambda x: x * jnp.arange(6) + jnp.ones(6, jnp.int32), (A,)),
    Entry("view", lambda x: x.view(jnp.int32), (A,), False),
]

ACTIVATIONS = [
    *_unary(nn, "relu relu6 sigmoid softplus sparse_plus soft_sign silu swish log_sigmoid tanh", A),
    *_unary(
        nn, "leaky_relu hard_sigmoid hard_silu hard_tanh elu celu selu gelu mish squareplus", A
    ),
    *_unary(nn, "softmax log_softmax logsumexp standardize identity sparse_sigmoid", A),
    Entry("nn.glu", nn.glu, (A,)),
    Entry("nn.gelu exact", lambda x: nn.gelu(x, approximate=False), (A,)),
    Entry("nn.softmax where", lambda x: nn.softmax(x, where=MASK), (A,)),
    Entry("nn.softmax axis", lambda x: nn.softmax(x, axis=0), (A,)),
    Entry("nn.log_softmax large", lambda x: nn.log_softmax(x * 100), (A,)),
    Entry("nn.logsumexp where", lambda x: nn.logsumexp(x, axis=1, where=x > -9), (A,)),
    Entry("nn.logsumexp infinite", lambda x: nn.logsumexp(jnp.where(MASK, x, -jnp.inf)), (A,)),
    Entry("nn.logsumexp weights", lambda x, p: nn.logsumexp(x, b=p), (A, P)),
    Entry("nn.one_hot", lambda x: nn.one_hot(IDS, 6) * x, (A,)),
    Entry(
        "nn.attention",
        lambda q, k, v: nn.dot_product_attention(q, k, v),
        (normal(2, 4, 2, 8), normal(2, 4, 2, 8), normal(2, 4, 2, 8)),
    ),
    Entry(
        "nn.attention causal",
        lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True),
        (normal(2, 4, 2, 8), normal(2, 4, 2, 8), normal(2, 4, 2, 8)),
    ),
    Entry("nn.relu max", lambda x: jnp.max(nn.relu(x), axis=-1), (A,)),
]

SHAPES = [
    *_unary(jnp, "ravel transpose flip fliplr flipud squeeze atleast_3d copy array", A),
    *_unary(jnp, "diag diagonal trace tril triu rot90", S),
    Entry("jnp.reshape", lambda x: x.reshape(3, 8), (A,)),
    Entry("jnp.swapaxes", lambda x: jnp.swapaxes(x, 0, 1), (A,)),
    Entry("jnp.moveaxis", lambda x: jnp.moveaxis(x, -1, 0), (IMAGE,)),
    Entry("jnp.expand_dims", lambda x: x[:, None, :, None], (A,)),
    Entry("jnp.broadcast_to", lambda x: jnp.broadcast_to(x, (3, 4, 6)), (A,)),
    Entry("jnp.concatenate", lambda x, y: jnp.concatenate([x, y * 3]), (A, B)),
    Entry("jnp.stack", lambda x, y: jnp.stack([x, y * y, x]), (A, B)),
    Entry("jnp.hstack", lambda x, y: jnp.hstack([x, y]), (A, B)),
    Entry("jnp.split", lambda x: jnp.split(x, 3, axis=1)[1], (A,)),
    Entry("jnp.tile", lambda x: jnp.tile(x, (2, 3)), (A,)),
    Entry("jnp.repeat", lambda x: jnp.repeat(x, 2, axis=1), (A,)),
    Entry("jnp.roll", lambda x: jnp.roll(x, 2, axis=1), (A,)),
    Entry("jnp.pad", lambda x: jnp.pad(x, 1), (A,)),
    Entry("jnp.pad constant", lambda x: jnp.pad(x, 1, constant_values=2.5), (A,)),
    Entry("jnp.pad reflect", lambda x: jnp.pad(x, 2, mode="reflect"), (A,)),
    Entry("jnp.take", lambda x: jnp.take(x, IDS, axis=1), (A,)),
    Entry(
        "jnp.take fill", lambda x: jnp.take(x, IDS + 3, axis=1, mode="fill", fill_value=1.5), (A,)
    ),
    Entry("jnp.take_along_axis", lambda x: jnp.take_along_axis(x, IDS[:, None], 1), (A,)),
    Entry("x[i]", lambda x: x[1:3, ::2] + x[IDS[:2], 1][:, None], (A,)),
    Entry("x[mask]", lambda x: x[jnp.nonzero(MASK, size=5)], (A,)),
    Entry("x.at.set", lambda x, v: x.at[1].set(v * 3), (A, V)),
    Entry("x.at.set constant", lambda x: x.at[:, 2].set(7.0), (A,)),
    Entry("x.at.add", lambda x, v: x.at[IDS].add(v), (A, V)),
    Entry("x.at.mul", lambda x, v: x.at[1].mul(v), (A, V)),
    Entry("x.at.max", lambda x, v: x.at[IDS[:2]].max(v), (A, V)),
    Entry("x.at.min", lambda x, v: x.at[IDS[:2]].min(v), (A, V), False),
    Entry("jnp.zeros_like", lambda x: jnp.zeros_like(x) + x, (A,)),
    Entry("jnp.ones_like", lambda x: jnp.ones_like(x) * 2 - x, (A,)),
    Entry("jnp.full_like", lambda x: jnp.full_like(x, 3.7) * x, (A,)),
    Entry("jnp.linspace", lambda x: jnp.linspace(x[0, 0], x[1, 1], 5), (A,)),
    Entry("jnp.meshgrid", lambda v, w: jnp.meshgrid(v, w)[1] * v, (V, W)),
    Entry("lax.dynamic_slice", lambda x: lax.dynamic_slice(x, (IDS[0] + 1, 2), (2, 3)), (A,)),
    Entry(
        "lax.dynamic_update_slice",
        lambda x, v: lax.dynamic_update_slice(x, v[None] * 5, (IDS[0], 0)),
        (A, V),
    ),
    Entry("lax.rev", lambda x: lax.rev(x, (0, 1)), (A,)),
    Entry("lax.pad", lambda x, v: lax.pad(x, v[0], ((0, 0, 1), (1, 1, 0))), (A, V)),
    Entry("lax.expand_dims", lambda x: lax.expand_dims(x, (1,)), (A,)),
    Entry("lax.broadcast_in_dim", lambda v: lax.broadcast_in_dim(v, (3, 6), (1,)), (V,)),
]

REDUCTIONS = [
    *_unary(jnp, "sum mean max min prod var std ptp median cumsum nansum nanmean nanmax", A),
    *_unary(jnp, "argmax argmin count_nonzero argsort any all", A, differentiable=False),
    *_unary(jnp, "cumprod nanprod", P),
    *_unary(lax, "cummax cummin cumlogsumexp", A),
    *_unary(jnp, "sort diff cov gradient", V),
    Entry("jnp.corrcoef", jnp.corrcoef, (A,)),
    Entry("jnp.sum axis", lambda x: x.sum(axis=0, keepdims=True), (A,)),
    Entry("jnp.sum where", lambda x: jnp.sum(x, where=MASK), (A,)),
    Entry("jnp.mean axis", lambda x: x.mean(axis=(0, 1)), (A,)),
    Entry("jnp.var axis", lambda x: x.var(axis=-1, ddof=1), (A,)),
    Entry("jnp.max initial", lambda x: jnp.max(x, axis=1, initial=-jnp.inf), (A,)),
    Entry("jnp.max where", lambda x: jnp.max(x, axis=1, initial=0.1, where=MASK), (A,)),
    Entry("jnp.average", lambda x, p: jnp.average(x, weights=p), (A, P)),
    Entry("jnp.quantile", lambda x: jnp.quantile(x, 0.3, axis=1), (A,)),
    Entry("jnp.percentile", lambda x: jnp.percentile(x, 70), (A,)),
    Entry("jnp.histogram", lambda x: jnp.histogram(x, bins=4, range=(-2, 2))[0], (A,), False),
    Entry("jnp.searchsorted", lambda v: jnp.searchsorted(jnp.sort(v), v), (V,), False),
    Entry("jnp.interp", lambda v, w: jnp.interp(v, jnp.linspace(-3.0, 3.0, 6), w), (V, W)),
    Entry("lax.top_k", lambda x: lax.top_k(x, 3)[0], (A,)),
    Entry("lax.sort pair", lambda x, y: lax.sort((x, y), num_keys=1)[1], (A, B)),
    Entry("lax.reduce", lambda x: lax.reduce(x, 0.0, lax.add, (0,)), (A,), False),
    Entry("lax.cumsum reverse", lambda x: lax.cumsum(x, axis=1, reverse=True), (A,)),
    Entry("lax.associative_scan", lambda x: lax.associative_scan(jnp.multiply, x), (P,)),
    Entry(
        "lax.reduce_window max",
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        (IMAGE,),
    ),
    Entry(
        "lax.reduce_window sum",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME"),
        (IMAGE,),
    ),
    Entry("segment_sum", lambda x: jax.ops.segment_sum(x, IDS, 5), (A,)),
    Entry("segment_max", lambda x: jax.ops.segment_max(x, IDS, 4), (A,), False),
    Entry("at.apply", lambda x: x.at[IDS[1:3]].apply(jnp.sin), (A,), False),
    Entry("norm clipping", lambda x: x * jnp.minimum(1.0, 0.5 / jnp.sqrt(jnp.sum(x**2))), (A,)),
    Entry(
        "layer norm",
        lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6),
        (A,),
        True,
        512.0,
    ),
    Entry("rms norm", lambda x: x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6), (A,)),
]

PRODUCTS = [
    Entry("x @ y", lambda x, y: x @ y, (A, C)),
    Entry("jnp.dot", lambda v, w: jnp.dot(v, w), (V, W)),
    Entry("jnp.vdot", lambda v, w: jnp.vdot(v, w), (V, W)),
    Entry("jnp.outer", lambda v, w: jnp.outer(v, w), (V, W)),
    Entry("jnp.inner", lambda x, y: jnp.inner(x, y), (A, B)),
    Entry("jnp.kron", lambda x, y: jnp.kron(x, y), (A, C)),
    Entry("jnp.cross", lambda v, w: jnp.cross(v[:3], w[:3]), (V, W)),
    Entry("jnp.tensordot", lambda x, y: jnp.tensordot(x, y, 1), (A, C)),
    Entry("jnp.einsum", lambda x, y: jnp.einsum("ij,kj,j->ik", x, y, y[0]), (A, B)),
    Entry("jnp.einsum batch", lambda x: jnp.einsum("bhwc,bhvc->bhwv", x, x), (IMAGE,)),
    Entry("jnp.matmul batch", lambda x, y: x[None] @ jnp.stack([y, y]), (A, C)),
    Entry("jnp.convolve", lambda v, w: jnp.convolve(v, w), (V, W)),
    Entry("jnp.polyval", lambda v, x: jnp.polyval(v, x), (V, A)),
    Entry(
        "lax.conv",
        lambda x, k: lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (IMAGE, KERNEL),
    ),
    Entry(
        "lax.conv strided",
        lambda x, k: lax.conv_general_dilated(
            x, k, (2, 2), "VALID", rhs_dilation=(2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (IMAGE, KERNEL),
    ),
    Entry(
        "lax.conv_transpose", lambda x, k: lax.conv_transpose(x, k, (2, 2), "SAME"), (IMAGE, KERNEL)
    ),
    Entry(
        "lax.ragged_dot",
        lambda x, y: lax.ragged_dot(x, jnp.stack([y, y * 2]), jnp.asarray([1, 3], jnp.int32)),
        (A, C),
    ),
    Entry("closed-over weight", lambda x: x @ (C * 3), (A,)),
    Entry("embedding", lambda table: table[IDS] * 2, (A,)),
    Entry(
        "lax.dot preferred", lambda x, y: lax.dot(x, y, preferred_element_type=jnp.float32), (A, C)
    ),
]

LINEAR_ALGEBRA = [
    Entry("linalg.norm", jnp.linalg.norm, (A,)),
    Entry("linalg.norm 1", lambda x: jnp.linalg.norm(x, ord=1, axis=0), (A,)),
    Entry("linalg.inv", jnp.linalg.inv, (SPD,), True, 2048.0),
    Entry("linalg.det", jnp.linalg.det, (SPD,), True, 2048.0),
    Entry("linalg.slogdet", lambda x: jnp.linalg.slogdet(x)[1], (SPD,), True, 2048.0),
    Entry("linalg.solve", lambda x, y: jnp.linalg.solve(x, y), (SPD, A), True, 2048.0),
    Entry("linalg.cholesky", jnp.linalg.cholesky, (SPD,), True, 2048.0),
    Entry("linalg.qr", lambda x: jnp.linalg.qr(x)[1], (C,), True, 2048.0),
    Entry("linalg.svd", lambda x: jnp.linalg.svd(x, compute_uv=False), (A,), True, 2048.0),
    Entry("linalg.eigh", lambda x: jnp.linalg.eigh(x)[0], (SPD,), True, 2048.0),
    Entry("linalg.eigvalsh", jnp.linalg.eigvalsh, (SPD,), True, 2048.0),
    Entry("linalg.pinv", jnp.linalg.pinv, (A,), False, 2048.0),
    Entry("linalg.matrix_power", lambda x: jnp.linalg.matrix_power(x, 3), (S,)),
    Entry("linalg.lstsq", lambda x, y: jnp.linalg.lstsq(x, y)[0], (C, V), False, 2048.0),
    Entry(
        "scipy.solve_triangular",
        lambda x, y: jax.scipy.linalg.solve_triangular(x, y, lower=True),
        (SPD, A),
        True,
        2048.0,
    ),
    Entry(
        "scipy.cho_solve",
        lambda x, y: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(x), y),
        (SPD, A),
        True,
        2048.0,
    ),
    Entry("scipy.expm", jax.scipy.linalg.expm, (SPD / 8,), True, 4096.0),
    Entry(
        "scipy.cg",
        lambda x, v: jax.scipy.sparse.linalg.cg(x, v, maxiter=30)[0],
        (SPD, V[:4]),
        True,
        4096.0,
    ),
]

FFT = [
    Entry("fft.fft", lambda x: jnp.abs(jnp.fft.fft(x)), (A,)),
    Entry("fft.ifft", lambda x: jnp.fft.ifft(jnp.fft.fft(x) * 2).real, (A,)),
    Entry("fft.rfft", lambda x: jnp.fft.rfft(x).imag, (A,)),
    Entry("fft.irfft", lambda x: jnp.fft.irfft(jnp.fft.rfft(x)), (A,)),
    Entry("fft.fft2", lambda x: jnp.fft.fft2(x).real, (A,)),
    Entry("fft.fftshift", lambda x: jnp.fft.fftshift(x), (A,)),
    Entry("fft.rfft2", lambda x: jnp.abs(jnp.fft.rfft2(x)) ** 2, (A,)),
    Entry("complex", lambda x, y: jnp.abs((x + 1j * y) * jnp.exp(1j * x)), (A, B)),
    Entry("jnp.angle", lambda x, y: jnp.angle(lax.complex(x, y)), (A, B)),
]

SPECIAL = [
    *_unary(jax.scipy.special, "erf erfc erfinv entr ndtr log_ndtr i0e i1e expit", IN),
    *_unary(jax.scipy.special, "gammaln digamma gamma", P),
    Entry("special.logit", jax.scipy.special.logit, (P / 4,)),
    Entry("special.xlogy", jax.scipy.special.xlogy, (P, Q)),
    Entry("special.betaln", jax.scipy.special.betaln, (P, Q)),
    Entry("special.gammainc", jax.scipy.special.gammainc, (P, Q), False),
    Entry("special.betainc", lambda x, y: jax.scipy.special.betainc(x, y, 0.4), (P, Q), False),
    Entry("special.zeta", lambda p: jax.scipy.special.zeta(p + 1, 2.0), (P,), False),
    Entry("special.polygamma", lambda p: jax.scipy.special.polygamma(1, p), (P,)),
    Entry("stats.norm.logpdf", jax.scipy.stats.norm.logpdf, (A,)),
    Entry("stats.norm.cdf", jax.scipy.stats.norm.cdf, (A,)),
    Entry("stats.laplace.logpdf", jax.scipy.stats.laplace.logpdf, (A,)),
]

RANDOM = [
    Entry("random.normal", lambda x: x + jax.random.normal(KEY, x.shape), (A,)),
    Entry("random.uniform", lambda x: x * jax.random.uniform(KEY, x.shape), (A,)),
    Entry(
        "random.uniform range",
        lambda v: jax.random.uniform(KEY, (6,), minval=v, maxval=v + 1),
        (V,),
    ),
    Entry(
        "random.bernoulli",
        lambda x: jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), x * 2, 0),
        (A,),
    ),
    Entry("random.bernoulli p", lambda p: jax.random.bernoulli(KEY, p / 2), (P,), False),
    Entry("random.categorical", lambda x: jax.random.categorical(KEY, x), (A,), False),
    Entry("random.permutation", lambda x: jax.random.permutation(KEY, x), (A,)),
    Entry("random.choice", lambda x: jax.random.choice(KEY, x, (3,)), (A,)),
    Entry("random.gumbel", lambda x: nn.softmax(x + jax.random.gumbel(KEY, x.shape)), (A,)),
    Entry(
        "random.truncated_normal",
        lambda x: x * jax.random.truncated_normal(KEY, -2.0, 2.0, x.shape),
        (A,),
    ),
    Entry("random.gamma", lambda p: jax.random.gamma(KEY, p), (P,), True, 2048.0),
    Entry("random.exponential", lambda x: x * jax.random.exponential(KEY, x.shape), (A,)),
    Entry("random.randint", lambda x: x[jax.random.randint(KEY, (3,), 0, 4)], (A,)),
    Entry("random.dropout", lambda x: x * jax.random.bernoulli(KEY, 0.8, x.shape) / 0.8, (A,)),
]


def parted(entries: list[Entry], words: str) -> tuple[list[Entry], list[Entry]]:
    """Divides entries into those whose last name starts with one of the words, and the rest."""
    starts = tuple(words.split())
    mine = [e for e in entries if e.name.split(".")[-1].startswith(starts)]
    return mine, [e for e in entries if e not in mine]


COMPARISONS, _REST = parted(
    ELEMENTWISE,
    "maximum minimum greater less equal not_equal isclose clip where select sign isnan isinf "
    "isfinite heaviside copysign",
)
RATIOS, _REST = parted(
    _REST, "divide true_divide reciprocal sqrt hypot arctan2 fmod remainder floor_divide divmod"
)
CASTS, FUNCTIONS = parted(_REST, "astype from view frexp ldexp")

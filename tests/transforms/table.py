"""Common functions of `jax.numpy`, `jax.nn`, `jax.lax` and `jax.random`.

A function is an expression whose arguments are the names in it that `ARGUMENTS` has. `f.{g h}(A)`
stands for two functions; a bar separates functions. Arguments are drawn once, and scaled.
"""

import ast
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

_RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(_RANDOM.normal(size=shape), jnp.float32)


def uniform(low: float, high: float) -> jax.Array:
    return jnp.asarray(_RANDOM.uniform(low, high, size=(4, 6)), jnp.float32)


S = normal(4, 4)
ARGUMENTS = {
    "A": normal(4, 6),
    "B": normal(4, 6),
    "C": normal(6, 5),
    "V": normal(6),
    "W": normal(6),
}
ARGUMENTS |= {"P": uniform(0.5, 2.0), "Q": uniform(0.5, 2.0), "U": uniform(-0.9, 0.9)}
ARGUMENTS |= {"S": S, "M": S / 4, "SPD": S @ S.T + 4 * jnp.eye(4)}
ARGUMENTS |= {
    "IMAGE": normal(2, 8, 8, 3),
    "KERNEL": normal(3, 3, 3, 4),
    "QKV": normal(3, 2, 4, 2, 8),
}
A, WEIGHT = ARGUMENTS["A"], ARGUMENTS["C"]
IDS = jnp.asarray([0, 2, 2, 3])
MASK = jnp.asarray(_RANDOM.random((4, 6)) < 0.5)
KEY = jax.random.key(3)
NHWC = ("NHWC", "HWIO", "NHWC")
TF32 = "TF32_TF32_F32"  # which CPUs do not have


class Entry(NamedTuple):
    """One function of the table; `steps` is the tolerance in units of float32's epsilon."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    grad: bool = True
    steps: float = 64.0
    slow: bool = False


@jax.custom_vjp
def clipped_gradient(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


clipped_gradient.defvjp(
    lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g * jnp.cos(x), -0.5, 0.5),)
)


@jax.custom_jvp
def steep(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


steep.defjvp(lambda p, t: (jnp.tanh(p[0]), 3 * t[0]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def power_of(x: jax.Array, n: int) -> jax.Array:
    return x**n


power_of.defvjp(
    lambda x, n: (x**n, [x]), lambda n, r, g: (n * g * r[0] ** (n - 1),), optimize_remat=True
)


def straight_through(x: jax.Array) -> jax.Array:
    return x + lax.stop_gradient(jnp.round(x) - x)


def newton(a: Any) -> Any:
    better = lambda s: ((s[0] + a / s[0]) / 2, s[1] + 1)  # noqa: E731
    return lax.while_loop(lambda s: s[1] < 6, better, (a, 0))[0]


def root(a: Any) -> Any:
    tangent = lambda g, y: y / g(jnp.ones(()))  # noqa: E731
    return lax.custom_root(lambda z: z**2 - a, a, lambda f, z: newton(a), tangent)


def adam_steps(w: jax.Array, x: jax.Array) -> jax.Array:
    tx = optax.adamw(0.1)
    state = tx.init(w)

    def step(carry: Any, _: Any) -> Any:
        w, state = carry
        loss, g = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        updates, state = tx.update(g, state, w)
        return (optax.apply_updates(w, updates), state), loss

    return lax.scan(step, (w, state), None, length=4)[0][0]


TABLE: list[tuple[dict[str, Any], str]] = [
    (
        {},
        """
jnp.{sin cos tanh sinh cosh arctan arcsinh exp exp2 expm1 square abs negative}(A)
jnp.{log log1p sqrt cbrt reciprocal}(P) | jnp.{arcsin arccos arctanh tan}(U)
jnp.{add subtract multiply maximum minimum arctan2}(A, B) | jnp.{divide power fmod}(P, Q)
nn.{relu sigmoid silu elu gelu softmax log_softmax logsumexp}(A) | jnp.{trace tril}(S)
jnp.{ravel transpose flip squeeze sum mean max prod var cumsum}(A) | jnp.cumprod(P)
lax.{cummax cummin cumlogsumexp}(A) | jnp.{sort diff}(V)
special.{erf erfc erfinv i0e i1e}(U) | special.{gammaln digamma}(P) | special.polygamma(1, P)
jnp.clip(A, -0.5, 0.7) | jnp.where(MASK, A, B) | jnp.where(MASK, A, 0.25)
jnp.where(MASK, A, -jnp.inf) | jnp.where(MASK, A, jnp.finfo(A.dtype).min)
(2 * A - B / 3 + 1) * -A + A**3 - 4 / (B * B + 1) | 1e-6 * A + 1e6 * A**2 - 0.1
A * jnp.arange(6) + jnp.ones(6, jnp.int32) | A.reshape(3, 8) | nn.one_hot(IDS, 6) * A
jnp.broadcast_to(A, (3, 4, 6)) | jnp.concatenate([A, B * 3]) | jnp.roll(A, 2, axis=1)
jnp.pad(A, 1, constant_values=2.5) | jnp.take(A, IDS, axis=1)
jnp.take(A, IDS + 3, axis=1, mode="fill", fill_value=1.5) | jnp.take_along_axis(A, IDS[:, None], 1)
A[1:3, ::2] + A[IDS[:2], 1][:, None] | A.at[1].set(V * 3) | A.at[:, 2].set(7.0)
A.at[IDS].add(V) | A.at[IDS[:2]].max(V) | jnp.full_like(A, 3.7) * A | jnp.zeros_like(A) + A
lax.dynamic_slice(A, (IDS[0] + 1, 2), (2, 3)) | lax.dynamic_update_slice(A, V[None], (IDS[0], 0))
lax.rev(A, (0, 1)) | lax.pad(A, V[0], ((0, 0, 1), (1, 1, 0))) | jnp.sum(A, where=MASK)
jnp.max(A, axis=1, initial=-jnp.inf) | lax.top_k(A, 3)[0] | lax.sort((A, B), num_keys=1)[1]
lax.cumsum(A, axis=1, reverse=True) | lax.associative_scan(jnp.multiply, P)
lax.reduce_window(IMAGE, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
lax.reduce_window(IMAGE, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")
jax.ops.segment_sum(A, IDS, 5) | A @ C | jnp.dot(V, W) | jnp.outer(V, W)
jnp.einsum("ij,kj,j->ik", A, B, B[0]) | jnp.einsum("bhwc,bhvc->bhwv", IMAGE, IMAGE)
lax.conv_general_dilated(IMAGE, KERNEL, (2, 2), "VALID", None, (2, 2), NHWC)
lax.conv_transpose(IMAGE, KERNEL, (2, 2), "SAME") | lax.dot(A, C, preferred_element_type=A.dtype)
lax.ragged_dot(A, jnp.stack([C, C * 2]), jnp.asarray([1, 3], jnp.int32))
jnp.abs(jnp.fft.fft(A)) | jnp.fft.rfft(A).imag | jnp.fft.irfft(jnp.fft.rfft(A))
jnp.abs((A + 1j * B) * jnp.exp(1j * A)) | jnp.angle(lax.complex(A, B))
A + jax.random.normal(KEY, A.shape) | A * jax.random.uniform(KEY, A.shape)
jax.jit(lambda x, y: x * y + 1)(A, B) | (lambda f: f(A) + f(2 * A))(jax.jit(lambda a: a * a + 1))
lax.scan(lambda c, a: (c + a, c * a), A[0], A)[1]
lax.scan(lambda c, a: (c * 0.5 + a, c), A[0], A, reverse=True)[1]
lax.scan(lambda c, a: ((c[0] + 1, c[1] + a * c[0]), c[0]), (0, A[0]), A)[0][1]
lax.scan(jax.checkpoint(lambda c, _: (jnp.tanh(c @ M), c)), S, length=4)[0]
lax.scan(lambda m, a: (0.9 * m + 0.1 * a, m), jnp.zeros(6), A)[0] / (1 - 0.9**4)
lax.fori_loop(0, 4, lambda i, c: c.at[i].set(A[i] * 2), jnp.zeros((4, 6)))
lax.cond(A[0, 0] > 0, lambda a: a * 3, lambda a: jnp.sin(a), A)
lax.switch((A[0, 0] > 0).astype(int) + 1, [jnp.sin, lambda a: 9 * a, lambda a: a * a], A)
jax.checkpoint(lambda x, m: jnp.sin(x @ m) @ m)(S, M)
checkpoint_name(A * 2, "h")**2 | clipped_gradient(A) | power_of(A, 3) | steep(A)
lax.platform_dependent(S, default=jnp.sin, tpu=lambda s: lax.dot(s, s, precision=TF32))
A * lax.stop_gradient(A) | straight_through(A) | jax.vmap(jnp.dot)(A, B)
jax.vmap(lambda a: a / lax.psum(a**2, "i"), axis_name="i")(A)
jax.vmap(lambda a: lax.cond(a[0] > 0, jnp.sin, jnp.cos, a))(A) | jax.jvp(jnp.tanh, (A,), (B,))[1]
jax.jacobian(lambda u: u**2 * u[0])(V) | (jax.debug.callback(lambda a: None, A), A * 2)[1]
jax.linearize(jnp.sin, A)[1](B) | lax.optimization_barrier(A * 2) + 1
""",
    ),
    (
        {"grad": False},
        """
jnp.{floor ceil rint trunc sign signbit isnan isinf isfinite}(A) | jnp.floor_divide(P, Q)
jnp.{greater less equal not_equal less_equal greater_equal}(A, B)
jnp.{argmax argmin count_nonzero argsort any all}(A) | nn.{relu silu softmax}(B)
clipped_gradient(B) | power_of(B, 2) | steep(B) | jax.checkpoint(jnp.sin)(B) | root(Q[0, 0])
jnp.nextafter(A, B) | (A * 3).astype(jnp.int32) | A.astype(bool)
A.view(jnp.int32) | A.at[IDS[:2]].min(V) | lax.reduce(A, 0.0, lax.add, (0,))
jax.ops.segment_max(A, IDS, 4) | special.zeta(P + 1, 2.0) | jax.random.bernoulli(KEY, P / 2)
newton(P) | lax.while_loop(lambda c: jnp.sum(c) < 50, lambda c: c * 2, P)
jax.vmap(lambda r: lax.while_loop(lambda s: jnp.max(s) < 9, lambda s: s * 2, r))(P)
jax.vmap(lambda n, a: lax.fori_loop(0, n, lambda i, c: jnp.sin(c) + i * a, a))(IDS, A)
jax.pure_callback(np.sin, jax.ShapeDtypeStruct(A.shape, A.dtype), A, vmap_method="sequential")
""",
    ),
    (
        {"slow": True},
        """
jnp.{sinc conj real median nan_to_num std}(A) | jnp.{log2 i0}(P) | jnp.{remainder copysign}(P, Q)
jnp.{logaddexp hypot}(A, B) | jnp.{cov gradient}(V) | special.{log_ndtr entr}(U)
nn.{softplus celu squareplus glu}(A) | jnp.corrcoef(A) | special.{xlogy betaln}(P, Q)
jnp.select([A > 1, A > 0], [A, B], 3.0) | jnp.ldexp(A, 3) | nn.log_softmax(A * 100)
nn.softmax(A, where=MASK) | nn.logsumexp(A, axis=1, where=A > -9) | nn.logsumexp(A, b=P)
nn.logsumexp(jnp.where(MASK, A, -jnp.inf)) | jnp.quantile(A, 0.3, axis=1) | jnp.kron(A, C)
nn.dot_product_attention(QKV[0], QKV[1], QKV[2], is_causal=True) | jnp.pad(A, 2, mode="reflect")
A[jnp.nonzero(MASK, size=5)] | A.at[1].mul(V) | jnp.max(A, axis=1, initial=0.1, where=MASK)
A * lax.rsqrt(jnp.mean(A**2, -1, keepdims=True) + 1e-6) | jnp.cross(V[:3], W[:3])
jnp.convolve(V, W) | jnp.polyval(V, A) | jnp.linalg.norm(A, ord=1, axis=0)
jnp.linalg.matrix_power(S, 3) | jnp.fft.ifft(jnp.fft.fft(A) * 2).real | jnp.fft.fft2(A).real
jax.scipy.stats.norm.{logpdf cdf}(A) | jax.random.uniform(KEY, (6,), minval=V, maxval=V + 1)
nn.softmax(A + jax.random.gumbel(KEY, A.shape)) | A[jax.random.randint(KEY, (3,), 0, 4)]
jax.random.permutation(KEY, A) | A * jax.random.truncated_normal(KEY, -2.0, 2.0, A.shape)
lax.scan(lambda c, a: (c + a * c, c), A[0], A, unroll=2)[0]
lax.scan(lambda c, a: (lax.scan(lambda d, _: (d * 0.9 + a, d), c, length=2)[0], c), A[0], A)[1]
lax.scan(lambda c, _: (c * 3, c), A, length=5)[1] | lax.map(lambda a: a / jnp.sum(a**2), A)
lax.scan(lambda c, _: (steep(c), c), A, length=3)[0] | jax.vjp(jnp.tanh, A)[1](B)[0]
jax.checkpoint(lambda x, m: jnp.sin(x @ m) @ m, policy=jax.checkpoint_policies.dots_saveable)(S, M)
jax.vmap(lambda a: lax.scan(lambda c, b: (c + b, c * b), 0.0, a)[1])(A)
jax.hessian(lambda u: jnp.sum(u**4) + u[0] * u[1])(V) | jnp.mean((nn.gelu(A @ C) @ C.T - A)**2)
jax.jvp(jax.grad(lambda u: jnp.sum(jnp.sin(u))), (V,), (W,))[1]
-lax.reduce_window(-A, jnp.inf, lax.min, (2, 2), (2, 2), "VALID")
jnp.einsum("te,td->ted", nn.softmax(lax.top_k(A, 3)[0]), A @ C)
optax.softmax_cross_entropy_with_integer_labels(A, IDS).mean() | optax.huber_loss(A, B)
optax.sigmoid_binary_cross_entropy(A, 1.0) | optax.kl_divergence(nn.log_softmax(A), nn.softmax(B))
jnp.interp(V, jnp.linspace(-3.0, 3.0, 6), W) | jnp.stack([A, B * B, A]) | jnp.average(A, weights=P)
A * jnp.minimum(1.0, 0.5 / jnp.sqrt((A**2).sum())) | jax.jit(lambda a: jax.jit(jnp.sin)(a) * a)(A)
jnp.sum(jax.grad(lambda a: jnp.sum(jnp.tanh(a @ WEIGHT)))(A) ** 2)
""",
    ),
    (
        {"grad": False, "slow": True},
        """
special.gammainc(P, Q) | special.betainc(P, Q, 0.4) | jnp.isclose(A, B) | jnp.frexp(A)[0]
jnp.histogram(A, bins=4, range=(-2, 2))[0] | jnp.searchsorted(jnp.sort(V), V)
jax.random.categorical(KEY, A)
""",
    ),
    ({"steps": 2.0**16}, "A.astype(jnp.float16).astype(jnp.float32)"),
    ({"steps": 1024.0}, "root(P[0, 0])"),
    (
        {"steps": 512.0},
        "(A - A.mean(-1, keepdims=True)) * lax.rsqrt(A.var(-1, keepdims=True) + 1e-6)",
    ),
    (
        {"steps": 512.0, "slow": True},
        """
lax.fori_loop(0, 5, lambda i, v: (lambda u: u / jnp.linalg.norm(u))(S @ v), jnp.ones(4))
""",
    ),
    (
        {"steps": 2048.0},
        """
jnp.linalg.solve(SPD, A) | jnp.linalg.cholesky(SPD) | jnp.linalg.qr(C)[1]
jnp.linalg.svd(A, compute_uv=False) | jnp.linalg.eigh(SPD)[0]
jax.scipy.linalg.solve_triangular(SPD, A, lower=True)
""",
    ),
    (
        {"steps": 2048.0, "slow": True},
        """
jnp.linalg.slogdet(SPD)[1] | jax.random.gamma(KEY, P) | jnp.linalg.{inv det}(SPD)
adam_steps(C, A) | jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(SPD), A)
""",
    ),
    (
        {"steps": 2048.0, "grad": False, "slow": True},
        "jnp.linalg.pinv(A) | jnp.linalg.lstsq(C, V)[0]",
    ),
    (
        {"steps": 4096.0, "slow": True},
        "jax.scipy.linalg.expm(SPD / 8) | jax.scipy.sparse.linalg.cg(SPD, V[:4], maxiter=30)[0]",
    ),
]


KNOWN = globals() | {"nn": jax.nn, "special": jax.scipy.special, "checkpoint_name": checkpoint_name}


def _entries(text: str, **options: Any) -> Iterator[tuple[str, Entry]]:
    for line in re.split(r" \| |\n", text.strip()):
        head, names, tail = re.split(r"\{(.*)\}", line) if "{" in line else (line, "", "")
        for name in names.split() or [""]:
            code = f"{head}{name}{tail}"
            used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
            given = [key for key in ARGUMENTS if key in used]
            function = eval(f"lambda {', '.join(given)}: {code}", KNOWN)
            yield code, Entry(function, tuple(ARGUMENTS[key] for key in given), **options)


ENTRIES = {code: e for options, text in TABLE for code, e in _entries(text, **options)}

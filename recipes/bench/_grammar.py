"""The grammar of `bench fuzz`: expressions, and random programs made of them.

A program is Python source, so that what is tried is what is printed. Holes are filled with
variables: {x} {y} {z} with floats, {n} with integers, {m} with booleans.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

_ELEMENTWISE = """
{x} + {y} | {x} - {y} | {x} * {y} | {x} / ({y} * {y} + 1) | -{x} | 2 * {x} + 1 | {x} * 1e-3
{x} * {x} | {x} ** 2 | {x} ** 3 | 1 - {x} | 3 / (1 + {x} * {x}) | abs({x}) | {x} * {n} | {x} + {n}
{x} - {n} | jnp.maximum({x}, {y}) | jnp.minimum({x}, {y}) | jnp.where({m}, {x}, {y})
jnp.where({m}, {x}, 0.0) | {x} * {m} | {x} > {y} | {x} + {y} + {z} | {x} * {y} + {z}
({x} - {y}) * {z} | {x} / 3 - {y} * 0.7
"""
_FUNCTIONS = """
jnp.sin({x}) | jnp.tanh({x}) | jnp.exp(-{x} * {x}) | jnp.log1p(jnp.abs({x})) | jnp.arctan({x})
jnp.sqrt(jnp.abs({x}) + 0.5) | lax.rsqrt({x} * {x} + 1) | jax.nn.relu({x}) | jax.nn.gelu({x})
jax.nn.sigmoid({x}) | jax.nn.silu({x}) | jax.nn.softplus({x}) | jnp.logaddexp({x}, {y})
jnp.expm1(jnp.tanh({x})) | jnp.clip({x}, -1, 2) | jnp.square({x}) | jnp.arctan2({x}, {y})
lax.erf({x}) | jnp.cbrt({x} + 3) | jnp.hypot({x}, {y})
"""
_REDUCTIONS = """
{x}.sum() | {x}.sum(-1) | {x}.mean(0) | {x}.sum(0, keepdims=True) | {x}.max(-1) | {x}.min()
{x}.mean() | {x} - {x}.mean(-1, keepdims=True) | {x} / (1 + abs({x}).max())
"""
_WHOLE = """
jax.nn.softmax({x}) | jax.nn.logsumexp({x}, axis=-1) | jnp.cumsum({x}, axis=0)
jnp.var({x}, axis=-1) | jnp.sort({x}, axis=-1) | jnp.prod({x}, axis=-1) | jnp.linalg.norm({x} + 1)
jax.nn.log_softmax({x})
({x} - {x}.mean(-1, keepdims=True)) * lax.rsqrt({x}.var(-1, keepdims=True) + 1e-5) | jnp.diff({x})
jnp.linalg.solve({x}.T @ {x} / (1 + jnp.sum({x} ** 2)) + 3 * jnp.eye({x}.shape[1]), {x}[0])
"""
_SHAPES = """
{x}.T | {x}[None] | {x}[..., :1] | {x}.reshape(-1) | {x}[..., None] | {x}[0] | {x}[::-1] | {x}[1:]
{x}[..., -1]
"""
_MOVES = """
jnp.concatenate([{x}, {y}]) | jnp.stack([{x}, {y}]) | jnp.pad({x}, [(0, 1)] * {x}.ndim)
jnp.roll({x}, 1) | jnp.broadcast_to({x}, (2, *{x}.shape)) | jnp.tile({x}, 2)
jnp.repeat({x}, 2, axis=0) | {x}.at[0].set({y}) | {x}.at[0].add({y}) | {x}.at[{n}].multiply(3)
jnp.take({x}, {n}, axis=0, mode='clip') | {x}.at[0].max({y})
jnp.pad({x}, 1, constant_values=7.0) | lax.dynamic_slice_in_dim({x}, 0, 1)
jnp.concatenate([{x}, jnp.ones_like({x})])
"""
_PRODUCTS = "{x} @ {y} | {x} @ {y}.T | {x}.T @ {y} | {x} @ {x}.T"
_MANY = """
jnp.outer({x}, {y}) | jnp.vdot({x}, {y}) | jnp.einsum('ij,kj->ik', {x}, {y})
jnp.einsum('...i,...i->...', {x}, {y}) | jnp.tensordot({x}, {y}, 1) | jnp.convolve({x}, {y})
"""
_CONTROL = """
lax.scan(lambda c, v: (c * 0.5 + v, c * v), {x}[0], {x})[1]
lax.scan(lambda c, v: (jnp.tanh(c + v), c), {x}[0], {x})[0]
lax.fori_loop(0, 3, lambda i, c: c * 0.5 + {x} * i, {x})
lax.map(lambda v: v / (1 + jnp.sum(v * v)), {x})
lax.cond({x}.sum() > 0, lambda a: a * 3, jnp.sin, {x})
lax.switch(1, [jnp.sin, lambda a: a * a], {x})
lax.scan(lambda c, _: (0.9 * c + 0.1 * {x}, c), jnp.zeros_like({x}), length=3)[1]
lax.scan(jax.checkpoint(lambda c, _: (jnp.sin(c) + {x}, None)), {x}, length=2)[0]
lax.scan(lambda c, v: (c + v, c), jnp.zeros({x}.shape[1:]), {x}, reverse=True)[1]
lax.cond({m}.all(), lambda a, b: a, lambda a, b: b, {x}, {x} * {x})
jax.jit(lambda a: a * jnp.cos(a))({x}) | lax.associative_scan(jnp.add, {x})
lax.scan(lambda c, v: (jnp.maximum(c, v), c), {x}[0], {x})[1]
"""
_TRANSFORMS = """
jax.checkpoint(lambda a: jnp.sin(a) * a)({x}) | jax.grad(lambda a: jnp.sum(jnp.tanh(a) * a))({x})
jax.vmap(lambda v: v * jnp.sum(v))({x}) | jax.vmap(jax.grad(lambda v: jnp.sum(v ** 3)))({x})
jax.jvp(jnp.sin, ({x},), ({x},))[1] | jax.vjp(jnp.tanh, {x})[1]({x})[0]
jax.vmap(jnp.dot)({x}, {y}) | jax.grad(lambda a: jnp.sum(jax.nn.softmax(a) ** 2))({x})
lax.stop_gradient({x}) * {x}
"""
_COMPLEX = """
jnp.abs(jnp.fft.fft({x})) | jnp.real(jnp.exp(1j * {x})) | jnp.imag(lax.complex({x}, {y}) ** 2)
jnp.fft.irfft(jnp.fft.rfft({x})) | jnp.abs(lax.complex({x} + 3, {y})) | jnp.real(jnp.conj(1j * {x}))
jnp.angle(lax.complex({x} * {x} + 1, {y})) | jnp.real(lax.complex({x}, {y}) @ lax.complex({y}, {x}))
"""
# `step`, `newton` and `parts` are the environment's: optax, a loop with a tolerance, shard_map.
_HELPED = """
step('adam', {x}, {y}) | step('sgd', {x}, {y}) | step('rmsprop', {x}, {y}) | newton({x})
step('clipped', {x}, {y}) | parts(lambda a: a * lax.psum(a, 'd'), {x}) | newton({x} * {y})
parts(lambda a: lax.all_gather(jnp.sin(a), 'd', tiled=True), {x}) | step('lion', {x}, {y})
parts(lambda a: lax.pmax(a, 'd') - a, {x}) | parts(lambda a: a / lax.pmean(1 + abs(a), 'd'), {x})
parts(lambda a: lax.ppermute(a, 'd', [(0, 1), (1, 0)]), {x})
parts(lambda a: lax.psum_scatter(a + 1, 'd', tiled=True), {x})
"""
_STEPS = """
step('adam', {x}, {y}) | step('sgd', {x}, {y}) | step('rmsprop', {x}, {y}) | step('lion', {x}, {y})
step('clipped', {x}, {y}) | step('adagrad', {x}, {y}) | step('adam', {x}, {x})
"""
_OPS = """
ops.add({x}, {y}) | ops.gelu({x}) | ops.relu({x}) | ops.tanh({x}) | ops.silu({x})
ops.sigmoid({x}) | ops.softmax({x}) | ops.layer_norm({x}) | ops.rms_norm({x})
ops.dense({x}, {y}) | ops.matmul({x}, {y}) | ops.readout({x}, {y}) | ops.dense({x}, {y}, {z})
ops.layer_norm({x}, {y}, {z}) | ops.weighted_add({x}, {y}, weights=(0.3, 0.7))
ops.silu_glu({x}, {y}) | ops.residual(ops.tanh, {x}, 0.5) | ops.scale({x}, 2.0, 0.5)
ops.mse_loss({x}, {y}) | ops.softmax_cross_entropy({x}, {n}) | ops.embed({n}, {x})
ops.dot_product_attention({x}, {y}, {z}) | ops.add({x}, {x}.mean(0)) | ops.rms_norm({x}, {y})
ops.gelu_glu({x}, {y})
"""
_QUANT = "q8({x}) | q8({x}, 'e5m2') | product({x}, {y}) | q8({x}) * 2 | product(q8({x}), {y}) + {z}"


def _split(*texts: str) -> tuple[str, ...]:
    lines = "\n".join(texts).replace("\n", " | ").split(" | ")
    return tuple(t.strip() for t in lines if t.strip())


_OPERATORS = _split(_ELEMENTWISE, _REDUCTIONS, _SHAPES, _PRODUCTS)
_LAX = _split(_FUNCTIONS, _WHOLE, _MOVES, _MANY, _TRANSFORMS, _COMPLEX)
KINDS: dict[str, tuple[str, ...]] = {
    "operators": _OPERATORS,
    "ops": (*_split(_OPS), *_split(_OPS), *_OPERATORS),
    "quant": (*_split(_QUANT), *_OPERATORS),
    "scalify": (*_OPERATORS, *_LAX),
    "control": (*_split(_CONTROL, _HELPED), *_split(_CONTROL, _HELPED), *_OPERATORS, *_LAX),
    "optim": (*_split(_STEPS), *_OPERATORS),
}
"""What the programs of a kind are made of."""

FORMATS = {
    "float16": 5,
    "bfloat16": 3,
    "float32": 3,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float64": 1,
}
# Few: each operation is compiled for each shape that it meets.
_SHAPES_OF = [(), (3,), (3,), (2, 3), (2, 3), (3, 3), (3, 3), (2, 1), (1, 3), (1,), (0, 3)]


@dataclass(frozen=True)
class Input:
    """An argument: its numbers as they are stored, and its scale; None for a plain array."""

    data: np.ndarray
    scale: np.ndarray | None = None

    @property
    def value(self) -> np.ndarray:
        """The numbers that are meant, in float64 where they are floats."""
        if not is_float(self.data.dtype):
            return self.data
        scale = 1.0 if self.scale is None else self.scale.astype(np.float64)
        return self.data.astype(np.float64) * scale

    @property
    def is_zero(self) -> bool:
        """Whether zeros have a scale."""
        return self.scale is not None and not self.value.any()

    @property
    def size(self) -> np.ndarray:
        """The numbers, zeros being as large as their scale: products of it leave the range too."""
        return self.value + self.scale if self.is_zero else self.value


@dataclass(frozen=True)
class Program:
    """Inputs by name, and lines ``(name, expression)`` of which unused names are the results."""

    kind: str
    inputs: Mapping[str, Input]
    lines: tuple[tuple[str, str], ...] = ()
    only: str | None = field(default=None)

    @property
    def results(self) -> list[str]:
        """Names of the results."""
        if self.only is not None:
            return [self.only]
        used = {word for _, text in self.lines for word in names_in(text)}
        return [name for name, _ in self.lines if name not in used]

    def source(self) -> str:
        """The function, as Python source."""
        body = [f"    {name} = {text}" for name, text in self.lines]
        head = f"def f({', '.join(self.inputs)}):"
        return "\n".join([head, *body, f"    return [{', '.join(self.results)}]"])

    def function(self, known: Mapping[str, Any]) -> Callable[..., list[Any]]:
        """The function, in an environment such as that of plain arrays."""
        space = dict(known)
        exec(self.source(), space)
        return space["f"]


def is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def names_in(text: str) -> list[str]:
    return re.findall(r"\b[vi]\d+\b", text)


def random_input(rng: np.random.Generator, formats: Sequence[str], kind: str) -> Input:
    shape = _SHAPES_OF[rng.integers(len(_SHAPES_OF))]
    draw = rng.random()
    if draw < 0.08:
        integers = rng.integers(0, 3, shape)
        dtype = rng.choice(["int32", "uint8", "int8"])
        # XLA's partitioner aborts the process on a gather whose indices are narrower.
        return Input(integers.astype("int32" if kind == "control" else dtype))
    if draw < 0.13:
        return Input(rng.random(shape) < 0.5)
    dtype = np.dtype(getattr(ml_dtypes, (name := str(rng.choice(formats))), None) or name)
    data = rng.normal(size=shape)
    if rng.random() < 0.08:
        data = data * 0
    if data.size and rng.random() < 0.12:
        # Not far smaller ones in float16: what is sliced off keeps the scale of the whole.
        small = [2.0**-6] if dtype == np.float16 else [2.0**-14, 2.0**-20]
        data.flat[rng.integers(data.size)] = rng.choice([0, 9, *small])
    if data.size and rng.random() < 0.04:
        data.flat[rng.integers(data.size)] = rng.choice([np.inf, -np.inf, np.nan])
    data = data.astype(dtype)
    if rng.random() < 0.12 and dtype.itemsize >= 4:
        return Input(data)
    most = rng.choice([0, 2, 12, 40, 100], p=[0.25, 0.3, 0.25, 0.15, 0.05])
    if dtype == np.float16 and kind not in ("scalify", "control"):
        most = min(
            most, 2
        )  # outside of scalify sums meet at scales that no data has been asked for
    exponents = rng.integers(-most, most + 1)
    if kind not in ("scalify", "control") and not data.any():
        # Beside zeros at a scale others are as small as that is large, and their powers smaller.
        exponents = np.clip(exponents, -30, 30)
    if len(shape) == 2 and rng.random() < 0.15:
        exponents = exponents + rng.integers(-3, 4, (shape[0], 1))
    return Input(data, np.exp2(exponents).astype(np.float32))


def random_program(rng: np.random.Generator, known: Mapping[str, Any]) -> Program:
    """Draws a program whose plain form has shapes that fit."""
    kind = str(rng.choice(list(KINDS), p=[0.2, 0.15, 0.1, 0.4, 0.1, 0.05]))
    weights = np.asarray(list(FORMATS.values()), float)
    count = 1 + (rng.random() < 0.15)
    formats = list(map(str, rng.choice(list(FORMATS), count, p=weights / weights.sum())))
    if "float64" in formats:
        formats = ["float64"]
    inputs = {f"i{k}": random_input(rng, formats, kind) for k in range(rng.integers(1, 5))}
    program = Program(kind, inputs)
    avals: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(x.value.shape, x.value.dtype) for name, x in inputs.items()
    }
    wanted = int(rng.integers(1, 6))
    for _ in range(40):
        if len(program.lines) == wanted:
            break
        text = _filled(rng, KINDS[kind][rng.integers(len(KINDS[kind]))], avals)
        if text is None:
            continue
        name = f"v{len(program.lines)}"
        longer = replace(program, lines=(*program.lines, (name, text)))
        function = replace(longer, only=name).function(known)
        try:
            (aval,) = jax.eval_shape(function, **{n: avals[n] for n in inputs})
        except Exception:
            continue  # the shapes do not fit
        if getattr(aval, "size", 99) <= 64:
            program, avals[name] = longer, aval
    return program


def _filled(rng: np.random.Generator, text: str, avals: Mapping[str, Any]) -> str | None:
    kinds = {"x": "f", "y": "f", "z": "f", "n": "iu", "m": "b"}
    chosen = {}
    # In the order of the text: that of a set differs from one process to the next.
    for hole in dict.fromkeys(re.findall(r"\{(\w)\}", text)):
        names = [name for name, a in avals.items() if a.dtype.kind in kinds[hole]]
        if not names:
            return None
        # Later results more often: so programs are deep.
        chosen[hole] = names[max(rng.integers(len(names), size=2))]
    return text.format(**chosen)

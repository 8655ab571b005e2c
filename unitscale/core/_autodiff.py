"""Static forward and backward factors, and gradients with respect to values of ScaledArrays."""

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._arithmetic import to_float
from ._compat import custom_vjp, match_varying
from ._convert import amax, scale_to_fit
from ._formats import (
    cast,
    format_of,
    gradients_format,
    is_float8,
    is_floating,
    materialize,
    narrow,
    narrow_gradients,
    wide_dtype,
    widen,
)
from ._scaled_array import ScaledArray, is_scaled, loss_value


def multiply(x: jax.Array, factor: float) -> jax.Array:
    """Multiply by a factor in the wide dtype, and round once to the dtype of ``x``.

    The factor itself is never rounded to a narrow type. A factor of 1 returns ``x`` unchanged.
    """
    if factor == 1:
        return x
    return narrow(widen(x) * factor, x.dtype)


@partial(custom_vjp, nondiff_argnums=(1, 2))
def _scale(x, fwd, bwd):
    return multiply(x, fwd)


_scale.defvjp(
    lambda x, fwd, bwd: (multiply(x, fwd), None),
    lambda fwd, bwd, _, cotangent: (multiply(cotangent, bwd),),
)


def scale(x: Any, fwd: float = 1.0, bwd: float = 1.0) -> Any:
    """Multiply by ``fwd`` in the forward pass, and multiply the cotangent by ``bwd``.

    Scaling:
        y = fwd * x; dx = bwd * dy, each computed in float32 (float64 for float64) and rounded
        once. The gradient is exact only if fwd == bwd. Use different factors only on cut edges, or
        together with other ops whose factors make up for the difference.

    Args:
        x: a floating array, or a ScaledArray (its data is multiplied, and its scale kept).
        fwd: static forward factor.
        bwd: static backward factor.

    Raises:
        TypeError: if ``x`` is not floating, or a factor is not a Python or NumPy number.

    Example:
        >>> print(jax.grad(lambda x: scale(x, 2.0, 3.0))(1.0))
        3.0

    References:
        Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257, scaled ops.
    """
    for name, factor in (("fwd", fwd), ("bwd", bwd)):
        if not isinstance(factor, (int, float, np.integer, np.floating)):
            raise TypeError(
                f"unitscale.ops.scale: {name} must be a static Python number; got "
                f"{type(factor).__name__}. Put a traced multiplier into ScaledArray.scale."
            )
    if is_scaled(x):
        return x.map_data(lambda data: _scale(data, float(fwd), float(bwd)))
    x = jnp.asarray(x)
    if not is_floating(x):
        raise TypeError(f"unitscale.ops.scale: x must be a floating array; got dtype {x.dtype}")
    return _scale(x, float(fwd), float(bwd))


def scale_fwd(x: Any, factor: float) -> Any:
    """Multiply by a static factor in the forward pass; leave the cotangent unchanged."""
    return scale(x, factor, 1.0)


def scale_bwd(x: Any, factor: float) -> Any:
    """Multiply the cotangent by a static factor; leave the forward value unchanged."""
    return scale(x, 1.0, factor)


_map_scaled = partial(jax.tree.map, is_leaf=is_scaled)

# -- gradients of values ---------------------------------------------------------------------


@custom_vjp
def _with_probe(x, probe):
    return x


_with_probe.defvjp(
    lambda x, probe: (x, jnp.zeros((0,), probe.dtype)),
    lambda like, cotangent: (None, narrow(cotangent, like.dtype)),
)


@jax.tree_util.register_pytree_with_keys_class
class DifferentiableArray(ScaledArray):
    """A parameter inside a differentiated function: its data is float32 or wider.

    The gradient of float16 data would also be float16, and overflow. JAX therefore differentiates
    with respect to ``probe``, an array of zeros in the dtype of the gradient. Each use converts
    ``stored`` again, so that scans and `jax.checkpoint` do not keep float32 copies of parameters.
    """

    __slots__ = ("probe", "stored")

    stored: jax.Array
    probe: jax.Array

    @property
    def data(self) -> jax.Array:
        """The data, converted from its storage format."""
        return _with_probe(widen(self.stored), self.probe)

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Flatten into stored data, probe and scale."""
        key = jax.tree_util.GetAttrKey
        parts = (self.stored, self.probe, self._scale)
        names = map(key, ("data", "probe", "scale"))
        return tuple(zip(names, parts, strict=True)), self._block_shape

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "DifferentiableArray":
        """Rebuild without checks, because JAX also unflattens placeholders."""
        stored, probe, scale = children
        new = object.__new__(cls)
        new._set(stored=stored, probe=probe, _scale=scale, _block_shape=aux)
        new._set(_has_scale=scale is not None)
        return new


def gradient_probe(x: Any, dtype: Any = None) -> Any:
    """Return the zeros to differentiate a ScaledArray with respect to; other leaves unchanged."""
    if not is_scaled(x):
        return x
    dtype = jnp.bfloat16 if dtype is not None and x.ndim > 1 else wide_dtype(x.dtype)
    return match_varying((jnp.zeros_like(x.data, dtype), x.data))[0]


def with_probe(x: Any, probe: Any) -> Any:
    """Return a ScaledArray ``x`` whose gradient goes to ``probe``; for other leaves, ``probe``."""
    if not is_scaled(x):
        return probe
    return DifferentiableArray.tree_unflatten(x.block_shape, (x.data, probe, x.scale))


def _is_whole(x: Any) -> bool:
    return is_scaled(x) or getattr(x, "keeps_gradient_dtype", False)


def value_gradients(own: Any, cotangents: Any, dtype: Any = None, key: Any = None) -> Any:
    """Convert gradients of data to gradients of values, rounded to ``dtype``."""
    leaves, structure = jax.tree.flatten(own, is_leaf=_is_whole)
    found = structure.flatten_up_to(cotangents)
    keys = [None] * len(leaves) if key is None else list(jax.random.split(key, len(leaves)))
    return structure.unflatten(map(partial(_value_gradient, dtype=dtype), leaves, found, keys))


def _value_gradient(x: Any, cotangent: Any, key: Any, dtype: Any) -> Any:
    narrows = dtype is not None and is_floating(cotangent) and cotangent.ndim > 1
    if narrows:
        # Without a barrier, XLA would keep the float32 array that it rounds here.
        cotangent = materialize(narrow(cotangent, jnp.bfloat16))
    if is_scaled(x):  # the gradient of the data, divided by the scale
        cotangent = widen(cotangent) / to_float(x.full_scale)
    return quantized_gradient(cotangent, dtype, key) if narrows else cotangent


def quantized_gradient(gradient: jax.Array, dtype: Any, key: Any = None) -> Any:
    """Round a gradient to bfloat16, or to FP8 with a power-of-two scale for each matrix."""
    if not is_float8(dtype):
        return narrow(gradient, dtype)
    axes = (-2, -1) if gradient.ndim > 2 else None
    largest = amax(gradient, axes)
    scale = scale_to_fit(largest, format_of(dtype))
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    rounding = "nearest" if key is None else "stochastic"
    return ScaledArray(materialize(cast(widen(gradient) / scale, dtype, rounding, key)), scale)


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
    gradients_dtype: Any = None,
    gradients_key: jax.Array | None = None,
) -> Callable[..., Any]:
    """Differentiate like `jax.value_and_grad`, with respect to the values of ScaledArrays.

    Scaling:
        value = data * scale, with the scale held constant. The gradient with respect to the value
        is therefore the gradient with respect to the data, in float32, divided by the scale. It
        does not depend on how a value is split into data and scale, so norms, clipping and averages
        of gradients are correct. (`jax.grad` differentiates with respect to the data.)

        ``gradients_dtype`` stores gradients of matrices in fewer bytes. FP8 matmuls write them in
        bfloat16, and round their factor to bfloat16 too; gradients of other ops are rounded from
        float32. FP8 gradients are then divided by a power-of-two scale, 2^ceil(log2(amax / largest
        number of the format)), between 2^-126 and 2^126 (1 if all entries are zero), and rounded
        again. If an entry is not finite, its whole matrix becomes NaN. Entries below about 2^-18 of
        the largest become zero in float8_e4m3fn, below 2^-32 in float8_e5m2; stochastic rounding
        (with a key) keeps their mean. Each matrix of a stack has its own scale. Vectors and scalars
        stay in float32.

    Args:
        fun: function of any pytrees that returns a scalar; the loss may be a ScaledArray.
        argnums: positions of the arguments to differentiate with respect to.
        has_aux: whether ``fun`` returns ``(value, aux)``.
        allow_int: whether arguments may hold integers, as in `jax.value_and_grad`.
        gradients_dtype: None for float32, "bfloat16", "float8_e4m3fn" or "float8_e5m2".
        gradients_key: `jax.random` key to round FP8 gradients stochastically, a new one for each
            step; None rounds to nearest.

    Returns:
        A function with the arguments of ``fun`` that returns ``(value, gradients)``. Gradients have
        the structure of the arguments, with a plain array for each ScaledArray. In FP8 they are
        ScaledArrays: `optim.scaled` accepts them; call ``to_array(gradients)`` for other uses.

    Raises:
        ValueError: if ``gradients_dtype`` is another format.

    Example:
        >>> w = ScaledArray(jnp.ones(2, jnp.float16), 4.0)
        >>> value, gradient = value_and_grad(lambda w: jnp.sum(3 * w.value))(w)
        >>> print(value, gradient)
        24.0 [3. 3.]
    """
    chosen = (argnums,) if isinstance(argnums, int) else argnums
    dtype = gradients_format("value_and_grad", gradients_dtype)

    @wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not all(-len(args) <= n < len(args) for n in chosen):
            raise TypeError(
                f"unitscale.value_and_grad: argnums must be positions of arguments; got {argnums} "
                f"for {len(args)} positional arguments"
            )
        own = tuple(args[n] for n in chosen)

        def by_data(data: tuple[Any, ...]) -> Any:
            given = list(args)
            for n, x, wide in zip(chosen, own, data, strict=True):
                given[n] = _map_scaled(with_probe, x, wide)
            return loss_value(fun(*given, **kwargs), has_aux)

        differentiate = jax.value_and_grad(by_data, has_aux=has_aux, allow_int=allow_int)
        with narrow_gradients(dtype):
            value, cotangents = differentiate(
                _map_scaled(partial(gradient_probe, dtype=dtype), own)
            )
        gradients = value_gradients(own, cotangents, dtype, gradients_key)
        return value, gradients[0] if isinstance(argnums, int) else gradients

    return run


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
    gradients_dtype: Any = None,
    gradients_key: jax.Array | None = None,
) -> Callable[..., Any]:
    """Differentiate like `jax.grad`, with respect to the values of ScaledArrays.

    See `value_and_grad` for the scaling, arguments and errors.

    Returns:
        A function with the arguments of ``fun`` that returns the gradients; with ``has_aux``,
        ``(gradients, aux)``.
    """
    options: dict[str, Any] = {"gradients_dtype": gradients_dtype, "gradients_key": gradients_key}
    differentiate = value_and_grad(fun, argnums, has_aux, allow_int=allow_int, **options)
    return drop_value(differentiate, has_aux)


def drop_value(differentiate: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """Turn the ``value_and_grad`` of a function into its ``grad``."""

    @wraps(differentiate)
    def run(*args: Any, **kwargs: Any) -> Any:
        value, gradients = differentiate(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return run

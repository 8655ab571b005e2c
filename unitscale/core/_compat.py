"""Uses of JAX that are private or depend on its version, and wrappers of its public functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax._src import core as jax_core, dtypes as jax_dtypes
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from jax.extend.core import Jaxpr, Literal


def take_as_array(
    cls: type, convert: Callable[[Any], Any], convert_loss: Callable[[Any], Any]
) -> None:
    """Let JAX's primitives accept objects of a class, by converting them to arrays.

    ``convert`` may raise ValueError, which users then see (JAX hides a TypeError). ``convert_loss``
    replaces it for the loss of `jax.grad`. If a version of JAX lacks these private tables, users
    see JAX's own message.
    """
    types = getattr(jax_core, "pytype_aval_mappings", None)
    if isinstance(types, dict):
        types[cls] = lambda x: jax_core.typeof((convert_loss if _is_loss() else convert)(x))
    register = getattr(jax_dtypes, "register_canonicalize_value_handler", None)
    if register is not None:
        register(cls, convert)


def _is_loss() -> bool:
    """Return whether the conversion was called by `jax.grad`, which checks the loss."""
    return sys._getframe(3).f_code.co_name == "_check_scalar"


# Reflected comparisons. Reflected methods of other operators have an "r" before their name.
_MIRRORS = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


def reflected_method() -> str:
    """Return the reflected method for the operator of `jax.Array` that is calling.

    It is "__radd__" for an addition, and "" if no operator is calling. If the right operand has no
    ``__jax_array__``, `jax.Array` returns NotImplemented, and Python calls the reflected method. If
    JAX renames its operators, results become plain arrays.
    """
    before, _, name = sys._getframe(2).f_code.co_name.partition("_operator_")
    return "" if before or not name else f"__{_MIRRORS.get(name, 'r' + name)}__"


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and of carried arrays in the parameters of a scan."""
    if "num_consts" in params:  # before JAX 0.12
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
    return consts, carry


def gpu_capability() -> float | None:
    """Return the compute capability of the default NVIDIA GPU; None if it is another device."""
    backend = jax.extend.backend.get_backend()
    if "cuda" not in backend.platform_version:
        return None
    return float(getattr(backend.local_devices()[0], "compute_capability", "8.0"))


@contextmanager
def cudnn_of(capability: tuple[int, int], version: int) -> Iterator[None]:
    """Make JAX check cuDNN attention against this GPU and cuDNN version in a ``with`` block.

    JAX would query the local GPU, but a machine that compiles ahead of time may not have one. In
    versions of JAX without these checks, this does nothing.
    """

    def of(text: str) -> tuple[int, ...]:
        return tuple(int(part) for part in text.split("."))

    answers = {
        "check_cudnn_version": lambda: version,
        "check_compute_capability": lambda least: capability >= of(least),
        "is_cuda_compute_capability_equal": lambda other: capability == of(other),
    }
    with _replaced(answers):
        yield


@contextmanager
def cudnn_accepts_float32() -> Iterator[None]:
    """Make JAX accept float32 operands of cuDNN's attention in a ``with`` block.

    scalify traces programs in float32, but runs them with 16-bit data.
    """

    def check_layout(*arrays: Any) -> None:
        half = [
            jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) if x.dtype == jnp.float32 else x
            for x in arrays[:3]
        ]
        own["check_layout"](*half, *arrays[3:])

    def large_negative(dtype: Any) -> Any:
        number = own["get_large_negative_number"]
        return number(jnp.bfloat16).astype(dtype) if dtype == jnp.float32 else number(dtype)

    answers = {"check_layout": check_layout, "get_large_negative_number": large_negative}
    with _replaced(answers) as own:
        yield


@contextmanager
def _replaced(functions: dict[str, Callable[..., Any]]) -> Iterator[dict[str, Callable[..., Any]]]:
    """Replace functions of JAX's cuDNN module that exist there, and yield the originals."""
    own = {name: getattr(jax_cudnn, name) for name in functions if hasattr(jax_cudnn, name)}
    for name in own:
        setattr(jax_cudnn, name, functions[name])
    try:
        yield own
    finally:
        for name, function in own.items():
            setattr(jax_cudnn, name, function)


def varying(x: jax.Array) -> frozenset[str]:
    """Return the mesh axes that an array varies over inside `jax.shard_map`."""
    manual = getattr(jax.typeof(x), "manual_axis_type", None)
    return getattr(manual, "varying", frozenset())


def match_varying(args: Any) -> Any:
    """Mark all arrays as varying over the mesh axes that any of them varies over.

    Gradients vary over all these axes, and JAX requires each to have the type of its argument. The
    transpose of this function sums a gradient over devices, as JAX's own operations do.
    """
    axes = frozenset().union(*map(varying, jax.tree.leaves(args)))

    def vary(x: Any) -> Any:
        missing = tuple(axes - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, args) if axes else args


_ADVICE = (
    "unitscale: {name} supports reverse-mode differentiation only, because its backward factors "
    "have no forward-mode meaning; use jax.vjp, jax.grad or jax.jacrev. For a Jacobian-vector "
    "product, differentiate twice: jax.vjp(lambda u: jax.vjp(f, x)[1](u)[0], u0)[1](v)."
)


class custom_vjp:
    """`jax.custom_vjp` with a helpful error under forward-mode differentiation.

    The TypeError names the function and a way to get the result in reverse mode. (If the function
    was traced first, as under jit, users see JAX's own message.)
    """

    __name__: str

    def __init__(self, fun: Callable[..., Any], nondiff_argnums: tuple[int, ...] = ()):
        """Wrap ``fun``; the arguments at ``nondiff_argnums`` are static."""
        self._fun = jax.custom_vjp(fun, nondiff_argnums=nondiff_argnums)
        self._static = frozenset(nondiff_argnums)
        update_wrapper(self, fun)

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        """Set the forward and backward rules, with the signatures of `jax.custom_vjp.defvjp`."""
        self._fun.defvjp(fwd, bwd)

    def __call__(self, *args: Any) -> Any:
        arrays = iter(match_varying([a for i, a in enumerate(args) if i not in self._static]))
        args = tuple(a if i in self._static else next(arrays) for i, a in enumerate(args))
        try:
            return self._fun(*args)
        except TypeError as error:
            if "forward-mode" not in str(error):
                raise
            name = self.__name__.strip("_")
            raise TypeError(_ADVICE.format(name=name)) from error


def last_uses(jaxpr: Jaxpr) -> dict[int, list[Any]]:
    """Return, for each equation, the variables that no later equation reads (liveness)."""
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        last |= {a: index for a in (*eqn.invars, *eqn.outvars) if not isinstance(a, Literal)}
    results = {a for a in jaxpr.outvars if not isinstance(a, Literal)}
    groups: dict[int, list[Any]] = {}
    for var, index in last.items():
        if var not in results:
            groups.setdefault(index, []).append(var)
    return groups

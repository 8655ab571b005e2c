"""Private or version-dependent parts of JAX, and additions to its public ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import core as jax_core, dtypes as jax_dtypes
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn
from jax.extend.core import Jaxpr, Literal


def take_as_array(
    cls: type, convert: Callable[[Any], Any], convert_loss: Callable[[Any], Any]
) -> None:
    """Let JAX's primitives accept objects of a class as the array that ``convert`` makes of them.

    Users see a ValueError that ``convert`` raises (JAX hides a TypeError). ``convert_loss`` is for
    what `jax.grad` differentiates. A version of JAX without these private tables shows its own
    message.
    """
    types = getattr(jax_core, "pytype_aval_mappings", None)
    if isinstance(types, dict):
        types[cls] = lambda x: jax_core.typeof((convert_loss if _is_loss() else convert)(x))
    register = getattr(jax_dtypes, "register_canonicalize_value_handler", None)
    if register is not None:
        register(cls, convert)


def _is_loss() -> bool:
    """Return whether `jax.grad` calls `take_as_array`, through `typeof`, to check the loss."""
    return sys._getframe(3).f_code.co_name == "_check_scalar"


# The mirror images of comparisons; those of other operators have an r before their names.
_MIRRORS = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


def mirror_asked_for() -> str:
    """Return the reflected method that an operator of `jax.Array` needs from its right operand.

    "__radd__" for an addition, "" if no operator is calling. For an operand without
    ``__jax_array__`` `jax.Array` returns NotImplemented, so that Python calls the reflected method.
    In a version of JAX with other names the result is a plain array.
    """
    asks, _, name = sys._getframe(2).f_code.co_name.partition("_operator_")
    return "" if asks or not name else f"__{_MIRRORS.get(name, 'r' + name)}__"


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of constants and carried leaves of a scan from its parameters."""
    if "num_consts" in params:  # before JAX 0.12
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
    return consts, carry


@contextmanager
def cudnn_of(capability: tuple[int, int], version: int) -> Iterator[None]:
    """Within the context, JAX checks cuDNN attention against this GPU and cuDNN version.

    JAX asks the local GPU, which a machine that compiles ahead of time need not have. In a version
    of JAX without these checks nothing is changed.
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
    """Within the context, float32 operands of cuDNN's attention are traced as 16-bit ones.

    scalify traces programs in float32 whose data will have 16 bits, which JAX's checks cannot know.
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
    """Replace functions of JAX's cuDNN module, as far as it has them, and yields the originals."""
    own = {name: getattr(jax_cudnn, name) for name in functions if hasattr(jax_cudnn, name)}
    for name in own:
        setattr(jax_cudnn, name, functions[name])
    try:
        yield own
    finally:
        for name, function in own.items():
            setattr(jax_cudnn, name, function)


_ADVICE = (
    "unitscale: {name} defines its backward pass only, because its backward factors exist in "
    "reverse mode; use jax.vjp, jax.grad or jax.jacrev. A Jacobian-vector product is the "
    "transpose of the transpose: jax.vjp(lambda u: jax.vjp(f, x)[1](u), u0)[1](v)."
)


def varying(x: jax.Array) -> frozenset[str]:
    """Return the mesh axes that an array varies over inside `jax.shard_map`."""
    manual = getattr(jax.typeof(x), "manual_axis_type", None)
    return getattr(manual, "varying", frozenset())


def match_varying(args: Any) -> Any:
    """Make all arrays vary over the mesh axes that any of them varies over.

    A gradient varies as the arguments together do, and must have the type of its own argument; the
    transpose of varying is a sum over devices, as for JAX's own operations.
    """
    axes = frozenset().union(*map(varying, jax.tree.leaves(args)))

    def vary(x: Any) -> Any:
        missing = tuple(axes - varying(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, args) if axes else args


class custom_vjp:
    """`jax.custom_vjp` with a helpful error under forward-mode differentiation.

    The TypeError names the function and the reverse-mode way to the same number. (If the function
    was traced into a jaxpr first, as under jit, JAX's own message appears.)
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
        """Call the function on positional arguments."""
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
    """Return, for every equation, the variables that no later equation reads (liveness)."""
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        last |= {a: index for a in (*eqn.invars, *eqn.outvars) if not isinstance(a, Literal)}
    results = {a for a in jaxpr.outvars if not isinstance(a, Literal)}
    groups: dict[int, list[Any]] = {}
    for var, index in last.items():
        if var not in results:
            groups.setdefault(index, []).append(var)
    return groups

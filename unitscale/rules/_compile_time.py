"""Evaluating a user's function while another one is traced: factors are Python floats, at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.sharding import AbstractMesh


@contextmanager
def compile_time() -> Iterator[None]:
    """Evaluate operations of JAX on known arrays at once, whatever is traced around.

    Inside `jax.shard_map` over some axes of the mesh of a `jax.set_mesh`, arrays made at once would
    take on a sharding that only parts of arrays have: here there is no mesh.

    Example:
        >>> def half(x):
        ...     with compile_time():
        ...         return float(jax.numpy.sin(0.5)) * x
        >>> print(jax.jit(half)(2.0))
        0.9588511
    """
    no_mesh = AbstractMesh((), ())
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(no_mesh):
        yield

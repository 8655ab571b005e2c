import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from unitscale.analysis import compile_h200, h200_available, h200_topology

OPTIMIZED = True


@pytest.mark.parametrize("found", [None, object()])
def test_availability_is_that_of_the_plugin(found, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {"jax_cuda13_plugin": found}.get)
    assert h200_available() == (found is not None)


def test_without_the_plugin_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=f"jax-cuda13-plugin=={jax.__version__}.*nvidia-nvvm"):
        h200_topology()


def test_a_host_has_a_device() -> None:
    with pytest.raises(ValueError, match="devices must be at least 1; got 0"):
        h200_topology(0)


@pytest.mark.h200
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_shapes_and_arrays_are_compiled_alike(wrap) -> None:
    """Only the shape and dtype of an array count, and a number needs none."""

    def f(tree, y, n):
        return tree["x"] @ tree["x"] + n * y

    small = jnp.ones((16, 16), jnp.bfloat16)
    shape = jax.ShapeDtypeStruct(small.shape, small.dtype)
    texts = [compile_h200(wrap(f), {"x": x}, x, 2.0).as_text() for x in (small, shape)]
    assert texts[0] == texts[1]
    assert "__cublas$lt$matmul" in texts[0]


@pytest.mark.h200
def test_triton_may_take_small_products() -> None:
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    assert "__triton" in compile_h200(lambda x: x @ x, x, triton=True).as_text()


@pytest.mark.h200
def test_arguments_over_several_devices_stay_there() -> None:
    mesh = Mesh(h200_topology(8).devices, ("data",))
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    program = compile_h200(lambda x: jnp.sum(x, axis=0), x)
    assert "all-reduce" in program.as_text()
    assert program.input_shardings[0][0].num_devices == 8

import jax
import jax.numpy as jnp
import pytest

from unitscale.analysis._program import traced


def choose(x):
    return x if x > 0 else -x


def say(x):
    jax.debug.print("{}", x)
    return x


def test_program_and_types() -> None:
    closed, out = traced("here", lambda x: (x.astype("float16"), {"n": 1}), jnp.ones(3))
    assert len(closed.jaxpr.outvars) == 2
    assert out[0].dtype == "float16"


@pytest.mark.parametrize(
    ("fn", "arg", "error", "message"),
    [
        (3, 1.0, TypeError, r"analysis\.here: expected a function; got int"),
        (choose, 1.0, TypeError, r"analysis\.here: .*needs the values of its arguments"),
        (lambda x: x, "text", TypeError, r"analysis\.here: expected arrays as arguments"),
        (lambda x: "text", 1.0, TypeError, r"analysis\.here: expected arrays as arguments"),
        (say, 1.0, ValueError, r"analysis\.here: expected a function without side effects"),
    ],
)
def test_bad_functions(fn, arg, error, message) -> None:
    with pytest.raises(error, match=message):
        traced("here", fn, arg)


def test_an_error_of_the_users_own_is_shown_as_it_is() -> None:
    with pytest.raises(TypeError, match="dot_general requires contracting"):
        traced("here", lambda x: x @ jnp.ones((4, 4)), jnp.ones((2, 3)))

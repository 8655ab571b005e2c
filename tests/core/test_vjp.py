"""custom_vjp: JAX's own, with advice in forward mode."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import custom_vjp


@partial(custom_vjp, nondiff_argnums=(1,))
def _triple(x, factor):
    """Three times."""
    return 3 * x


_triple.defvjp(
    lambda x, factor: (3 * x, x.shape), lambda factor, shape, dy: (factor * jnp.ones(shape),)
)


def test_rules_are_used() -> None:
    value, vjp = jax.vjp(lambda x: _triple(x, 7.0), jnp.ones(2))
    np.testing.assert_array_equal(value, [3, 3])
    np.testing.assert_array_equal(vjp(jnp.ones(2))[0], [7, 7])


def test_name_and_docstring_are_kept() -> None:
    assert (_triple.__name__, _triple.__doc__) == ("_triple", "Three times.")


@pytest.mark.parametrize(
    "differentiate",
    [
        lambda f, x: jax.jvp(f, (x,), (x,)),
        lambda f, x: jax.jacfwd(f)(x),
        lambda f, x: jax.vmap(lambda x: jax.jvp(f, (x,), (x,)))(x),
    ],
    ids=["jvp", "jacfwd", "vmap"],
)
def test_forward_mode_says_what_to_do(differentiate: object) -> None:
    message = r"unitscale: triple defines its backward pass only.*use jax\.vjp.*transpose"
    with pytest.raises(TypeError, match=message):
        differentiate(lambda x: _triple(x, 2.0), jnp.ones(2))


def test_the_advice_is_right() -> None:
    """The transpose of the transpose is the Jacobian-vector product of the rule's Jacobian."""
    f, x, v = lambda x: _triple(x, 5.0), jnp.ones(2), jnp.asarray([1.0, -2.0])

    @custom_vjp
    def linear(x):
        return 3 * x

    linear.defvjp(lambda x: (3 * x, None), lambda _, dy: (5 * dy,))
    jvp = jax.vjp(lambda u: jax.vjp(linear, x)[1](u)[0], jnp.zeros(2))[1](v)[0]
    np.testing.assert_array_equal(jvp, 5 * v)
    np.testing.assert_array_equal(jax.jacrev(f)(x), np.full((2, 2), 5.0))


def test_other_errors_pass_through() -> None:
    @custom_vjp
    def fails(x):
        raise TypeError("my own message")

    fails.defvjp(lambda x: (x, None), lambda _, dy: (dy,))
    with pytest.raises(TypeError, match="my own message"):
        fails(1.0)


def test_arguments_that_vary_over_different_devices() -> None:
    """Inside shard_map the gradient of what is replicated is summed, as JAX does by itself."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @custom_vjp
    def product(x, y):
        return x * y

    product.defvjp(lambda x, y: (x * y, (x, y)), lambda xy, dy: (dy * xy[1], dy * xy[0]))

    def gradients(f):
        def local(x, y):
            return jax.grad(lambda *a: jnp.sum(f(*a)), argnums=(0, 1))(x, y)

        spec = jax.sharding.PartitionSpec
        split = jax.shard_map(
            local, mesh=mesh, in_specs=(spec("data"), spec()), out_specs=(spec("data"), spec())
        )
        return jax.jit(split)(jnp.arange(8.0), jnp.full(1, 3.0))

    for ours, theirs in zip(gradients(product), gradients(jnp.multiply), strict=True):
        np.testing.assert_array_equal(ours, theirs)

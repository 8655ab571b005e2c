"""What is private in JAX or differs between its versions."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from unitscale.core import ScaledArray, _compat, cudnn_of, last_uses, scan_counts
from unitscale.core._compat import take_as_array


def test_every_variable_but_results_has_a_last_use() -> None:
    def fn(x, unused):
        y = jnp.sin(x)
        return y * x + 1, y

    jaxpr = jax.make_jaxpr(fn)(1.0, 2.0).jaxpr
    x, _ = jaxpr.invars
    assert last_uses(jaxpr) == {1: [x], 2: [jaxpr.eqns[1].outvars[0]]}


@pytest.mark.parametrize("carried", [0, 3])
def test_a_scan_has_constants_then_what_it_carries(carried: int) -> None:
    def program(first: jax.Array, second: jax.Array, items: jax.Array) -> tuple:
        def turn(state: tuple, item: jax.Array) -> tuple:
            return tuple(x + first for x in state), item * second

        return lax.scan(turn, (jnp.ones(2),) * carried, items)

    closed = jax.make_jaxpr(program)(jnp.ones(2), jnp.ones(2), jnp.ones((4, 2)))
    (loop,) = (eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "scan")
    assert scan_counts(loop.params) == (1 + bool(carried), carried)


def test_operators_of_arrays_leave_the_answer_to_a_scaled_array() -> None:
    """Of those that it has; the others, and functions, take its value."""
    array, x = jnp.asarray([3.0, 5.0]), ScaledArray(jnp.ones(2), 2.0)
    for op in (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow):
        for found in (op(array, x), jax.jit(op)(array, x)):
            assert isinstance(found, ScaledArray)
            np.testing.assert_allclose(found.value, op(array, x.value), rtol=1e-6)
    assert isinstance(array @ x, ScaledArray)
    for found in (array // x, array % x, jnp.add(array, x), array < x, array == x):
        assert isinstance(found, jax.Array)
    np.testing.assert_array_equal(array // x, [1, 2])
    array += x
    assert isinstance(array, ScaledArray)


@pytest.mark.parametrize(
    "f", [lax.sin, lambda x: lax.dot(x, x), jax.jit(lax.exp), jax.grad(lambda x: x)]
)
def test_errors_for_want_of_a_value_name_the_library(f) -> None:
    x = ScaledArray(jnp.ones((2, 2)), 2.0)
    with pytest.raises(ValueError, match=r"unitscale: a plain array .* ScaledArray.*its \.value"):
        f(x)


@pytest.mark.parametrize("scale", [None, 2.0])
def test_a_loss_that_is_a_scaled_array_is_refused_by_name(scale: float | None) -> None:
    def loss(x: jax.Array) -> ScaledArray:
        return ScaledArray(x, scale).sum()

    message = r"unitscale: a plain array is needed as the loss; .*nn\.value_and_grad"
    for f in (jax.grad(loss), jax.jit(jax.value_and_grad(loss))):
        with pytest.raises(ValueError, match=message):
            f(jnp.ones(2))


def test_what_takes_arrays_of_any_type_still_does() -> None:
    x = ScaledArray(jnp.ones((2, 2)), 2.0)
    for f in (jnp.sin, jax.nn.softmax, jnp.linalg.norm, lambda x: jax.jit(jnp.sum)(x)):
        np.testing.assert_array_equal(f(x), f(x.value))


def test_without_a_scale_the_functions_of_jax_and_their_derivatives_take_the_data() -> None:
    x = jnp.linspace(-2, 3, 8)

    def results(wrap) -> list:
        functions = (jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.lax.exp)
        return [jax.value_and_grad(lambda x: jnp.sum(f(wrap(2 * x))))(x) for f in functions]  # noqa: B023

    plain, wrapped = (jax.jit(lambda w=w: results(w))() for w in (lambda x: x, ScaledArray))
    jax.tree.map(np.testing.assert_array_equal, plain, wrapped)


def test_a_jax_without_a_place_for_it_keeps_its_own_message(monkeypatch) -> None:
    monkeypatch.delattr(_compat.jax_core, "pytype_aval_mappings")
    monkeypatch.delattr(_compat.jax_dtypes, "register_canonicalize_value_handler")
    take_as_array(type("Other", (), {}), lambda x: x, lambda x: x)


def test_cudnn_is_answered_for_within_the_block_alone() -> None:
    own = vars(_compat.jax_cudnn).copy()
    with cudnn_of((9, 0), 91200):
        assert _compat.jax_cudnn.check_cudnn_version() == 91200
        least = _compat.jax_cudnn.check_compute_capability
        assert [least(text) for text in ("8.0", "9.0", "10.3")] == [True, True, False]
        same = _compat.jax_cudnn.is_cuda_compute_capability_equal
        assert [same(text) for text in ("9.0", "10.3")] == [True, False]
    assert vars(_compat.jax_cudnn) == own


def test_a_jax_without_these_checks_is_left_alone(monkeypatch) -> None:
    monkeypatch.delattr(_compat.jax_cudnn, "check_cudnn_version")
    with cudnn_of((9, 0), 91200):
        assert not hasattr(_compat.jax_cudnn, "check_cudnn_version")

"""Static factors, custom_vjp, gradients by value, and JAX functions on ScaledArrays."""

import copy
import operator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import unitscale
from unitscale.core import (
    ScaledArray,
    custom_vjp,
    last_uses,
    multiply,
    rebalance,
    scale,
    scale_bwd,
    scale_fwd,
    to_array,
)


class TestScale:
    @pytest.mark.parametrize(
        ("dtype", "wrap"),
        [("float16", jax.vmap), ("bfloat16", jax.jit), ("float32", jax.checkpoint)],
    )
    def test_multiplies_once_each_way(self, dtype: str, wrap: Any) -> None:
        x, dy = jnp.float32([[0.7, -1.3], [5.0, 0.0]]), jnp.float32([[0.011, 0.02], [-0.03, 0.05]])
        x, dy = x.astype(dtype), dy.astype(dtype)
        pairs = ((2.0, 0.25), (1.0, 3.0), (0.3, 1.0), (1e-6, 1e6))

        def both(x, dy):
            pulls = [jax.vjp(wrap(partial(scale, fwd=fwd, bwd=bwd)), x) for fwd, bwd in pairs]
            return [(y, vjp(dy)[0]) for y, vjp in pulls]

        for factors, results in zip(pairs, jax.jit(both)(x, dy), strict=True):
            for got, source, factor in zip(results, (x, dy), factors, strict=True):
                assert got.dtype == dtype
                expected = (np.float32(source) * np.float32(factor)).astype(x.dtype)
                np.testing.assert_array_equal(got, expected)

    def test_each_direction_alone(self) -> None:
        for fn, expected in ((scale_fwd, (8, 1)), (scale_bwd, (2, 4))):
            assert jax.value_and_grad(lambda x: fn(x, 4.0))(2.0) == expected  # noqa: B023

    def test_8_bits_saturate(self) -> None:
        x = jnp.full(1, 300, jnp.float8_e4m3fn)
        y, vjp = jax.vjp(lambda x: scale(x, 2.0, -3.0), x)
        assert (y.item(), vjp(x)[0].item()) == (448, -448)

    @pytest.mark.parametrize(
        "args",
        [*[(1.0, 1.0, f) for f in (jnp.float32(2), "2", None, 2j, np.ones(1))],
         *[(x, 2.0) for x in (1, jnp.arange(3), True)]],
    )  # fmt: skip
    def test_wrong_arguments(self, args: tuple) -> None:
        match = "bwd must be a static" if len(args) == 3 else "x must be a floating array"
        with pytest.raises(TypeError, match=rf"unitscale\.ops\.scale: {match}"):
            scale(*args)

    def test_multiply_rounds_once_and_a_factor_of_1_is_nothing(self) -> None:
        x = jnp.asarray([1e-4, 6e4], jnp.float16)
        expected = (np.asarray(x, np.float32) * np.float32(1e-3)).astype(np.float16)
        np.testing.assert_array_equal(multiply(x, 1e-3), expected)
        assert not jax.make_jaxpr(lambda x: multiply(x, 1.0))(x).eqns


@partial(custom_vjp, nondiff_argnums=(1,))
def _triple(x, factor):
    """Return three times x."""
    return 3 * x


_triple.defvjp(
    lambda x, factor: (3 * x, x.shape), lambda factor, shape, dy: (factor * jnp.ones(shape),)
)


class TestCustomVjp:
    def test_rules_are_used(self) -> None:
        value, vjp = jax.vjp(lambda x: _triple(x, 7.0), jnp.ones(2))
        np.testing.assert_array_equal(value, [3, 3])
        np.testing.assert_array_equal(vjp(jnp.ones(2))[0], [7, 7])
        assert (_triple.__name__, _triple.__doc__) == ("_triple", "Return three times x.")

    def test_arguments_that_vary_over_different_devices(self) -> None:
        """Inside shard_map gradients of replicated arguments are summed, as in JAX."""
        mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

        @custom_vjp
        def product(x, y):
            return x * y

        product.defvjp(lambda x, y: (x * y, (x, y)), lambda xy, dy: (dy * xy[1], dy * xy[0]))

        def gradients(f):
            def local(x, y):
                return jax.grad(lambda *a: jnp.sum(f(*a)), argnums=(0, 1))(x, y)

            specs = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()
            split = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs)
            return jax.jit(split)(jnp.arange(8.0), jnp.full(1, 3.0))

        jax.tree.map(np.testing.assert_array_equal, gradients(product), gradients(jnp.multiply))


VALUE = jnp.asarray(np.random.default_rng(0).uniform(0.5, 2, (4, 6)), jnp.float32)
SCALES = {
    "none": None,
    "tensor": jnp.float32(2.0**-7),
    "channel": jnp.asarray(2.0 ** np.arange(-3, 3), jnp.float32),
    "e8m0": jnp.float32(2.0**5).astype(jnp.float8_e8m0fnu),
}


def loss(params):
    return jnp.sum(jnp.sin(to_array(params)["w"])) + jnp.sum(to_array(params)["b"] ** 2)


def params_of(kind: str, dtype: str = "float32") -> dict[str, Any]:
    scale = SCALES[kind]
    data = VALUE if scale is None else VALUE / np.asarray(scale).astype(np.float32)
    return {"w": ScaledArray(data.astype(dtype), scale), "b": jnp.ones(3)}


class TestValueAndGrad:
    def test_is_that_of_the_value(self) -> None:
        dtypes = ("float32", "float16", "float8_e4m3fn")
        cases = [params_of(kind, dtype) for kind in SCALES for dtype in dtypes]
        derive = unitscale.value_and_grad(loss)
        results = jax.jit(lambda cases: [derive(params) for params in cases])(cases)
        for params, (value, grads) in zip(cases, results, strict=True):
            plain = to_array(params, jnp.float32)
            assert jax.tree.structure(grads) == jax.tree.structure(plain)
            assert grads["w"].dtype == jnp.float32
            np.testing.assert_allclose(value, loss(plain), rtol=1e-6)
            np.testing.assert_allclose(grads["w"], np.cos(plain["w"]), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(grads["b"], 2 * plain["b"])

    def test_does_not_depend_on_the_scale(self) -> None:
        params = params_of("tensor")
        moved = params | {"w": rebalance(params["w"], 2.0**5)}
        np.testing.assert_array_equal(*(unitscale.grad(loss)(p)["w"] for p in (params, moved)))
        w = ScaledArray(jnp.ones(2, jnp.float16), 2.0**10)
        f = lambda w: 100 * jnp.sum(w.value)  # noqa: E731
        assert np.isinf(jax.grad(f)(w).data).all()
        np.testing.assert_array_equal(unitscale.grad(f)(w), [100, 100])

    @pytest.mark.parametrize("dtype", [None, "bfloat16"])
    def test_checkpoint_and_scan_keep_parameters_as_stored(self, dtype: str | None) -> None:
        w = ScaledArray(jnp.ones((2, 3, 3), jnp.float16), jnp.full((2, 1, 1), 2.0**10))

        @jax.checkpoint
        def apply(x, w):
            return jnp.sin(x @ w.value), None

        def f(w):
            return jnp.sum(jax.lax.scan(apply, jnp.ones(3), w)[0])

        differentiate = unitscale.grad(f, gradients_dtype=dtype)
        (*_, backward) = (
            eqn for eqn in jax.make_jaxpr(differentiate)(w).eqns if eqn.primitive.name == "scan"
        )
        kept, made = (
            {v.aval.dtype for v in each if v.aval.shape == (2, 3, 3)}
            for each in (backward.invars, backward.outvars)
        )
        assert (kept, made) == ({jnp.dtype("float16")}, {jnp.dtype(dtype or "float32")})
        exact = jax.grad(lambda value: f(ScaledArray(value)))(w.value)
        np.testing.assert_allclose(differentiate(w), exact, rtol=2**-7, atol=1e-6)

    def test_arguments_are_those_of_jax(self) -> None:
        w, x = ScaledArray(jnp.ones(3), 2.0), jnp.arange(3.0)

        def f(w, x, *, power=1):
            y = jnp.sum(to_array(w) ** power * x)
            return y, {"y": y, "power": power}

        (value, aux), (dx, dw) = unitscale.value_and_grad(f, (1, 0), has_aux=True)(w, x, power=2)
        assert (float(value), float(aux["y"]), aux["power"]) == (12, 12, 2)
        np.testing.assert_array_equal(dx, [4, 4, 4])
        np.testing.assert_array_equal(dw, [0, 4, 8])
        last, aux = unitscale.grad(f, -1, has_aux=True)(w, x)
        np.testing.assert_array_equal(last, [2, 2, 2])
        assert aux["power"] == 1
        with pytest.raises(TypeError, match=r"argnums .* got 2 for 2 positional"):
            unitscale.grad(f, 2)(w, x)
        with pytest.raises(TypeError, match="int32"):
            unitscale.grad(lambda n: n.sum() * 1.0)(jnp.arange(3))
        tree = {"w": w, "n": jnp.arange(3)}
        grads = unitscale.grad(lambda p: p["w"].value.sum(), allow_int=True)(tree)
        assert grads["n"].dtype == jax.dtypes.float0

    @pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
    def test_inside_and_outside_of_other_transformations(self, wrap: Any) -> None:
        w = ScaledArray(jnp.ones((2, 3)), 4.0)
        f = wrap(lambda w: jnp.sum(to_array(w) ** 3))
        np.testing.assert_allclose(jax.jit(unitscale.grad(f))(w), np.full((2, 3), 48))
        # Twice: the Hessian's diagonal of a sum of cubes is 6 w.
        twice = unitscale.grad(lambda w: jnp.sum(unitscale.grad(f)(w)))(w)
        np.testing.assert_allclose(twice, np.full((2, 3), 24))


def test_every_variable_but_results_has_a_last_use() -> None:
    def fn(x, unused):
        y = jnp.sin(x)
        return y * x + 1, y

    jaxpr = jax.make_jaxpr(fn)(1.0, 2.0).jaxpr
    x, _ = jaxpr.invars
    assert last_uses(jaxpr) == {1: [x], 2: [jaxpr.eqns[1].outvars[0]]}


def test_operators_of_arrays_leave_the_answer_to_a_scaled_array() -> None:
    """Operators of ScaledArray keep the scale; others, and functions, use the value."""
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


def test_without_a_scale_the_functions_of_jax_and_their_derivatives_take_the_data() -> None:
    x = jnp.linspace(-2, 3, 8)

    def results(wrap) -> list:
        functions = (jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.lax.exp)
        return [jax.value_and_grad(lambda x: jnp.sum(f(wrap(2 * x))))(x) for f in functions]  # noqa: B023

    plain, wrapped = (jax.jit(lambda w=w: results(w))() for w in (lambda x: x, ScaledArray))
    jax.tree.map(np.testing.assert_array_equal, plain, wrapped)


def test_copies_and_tiny_gradients() -> None:
    weight = ScaledArray(jnp.ones((2, 2)), 2.0)
    np.testing.assert_array_equal(unitscale.grad(lambda w: copy.copy(w).value.sum())(weight), 1.0)
    tiny = unitscale.grad(lambda w: 1e-37 * w.value.sum(), gradients_dtype="float8_e4m3fn")(weight)
    np.testing.assert_allclose(tiny.value, 1e-37, rtol=2.0**-3)

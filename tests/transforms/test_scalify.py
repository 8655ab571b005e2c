"""`scalify` itself: arguments, results, errors, and registering rules."""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from tests.refusals import refuses
from unitscale import ScaledArray, as_scaled, to_array
from unitscale.transforms import coverage, register, scalify, unlisted


def test_report_names_the_line_of_every_default_rule() -> None:
    def program(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) @ jnp.linalg.cholesky(x)

    x = as_scaled(jnp.eye(3))
    report = scalify(program).report(x)
    assert [d.primitive for d in report] == ["cholesky"]
    line = program.__code__.co_firstlineno + 1
    assert str(report[0]).startswith(f"cholesky at {__file__}:{line} (")
    assert scalify(jnp.tanh).report(x) == []


def test_scalify_of_scalify_is_itself() -> None:
    scaled = scalify(jnp.sin)
    assert scalify(scaled) is scaled
    x = as_scaled(jnp.ones(2))
    nested = scalify(lambda a: scalify(jnp.sin)(a) * 2)(x)
    np.testing.assert_allclose(to_array(nested), 2 * jnp.sin(x.value), rtol=1e-6)


def test_keyword_arguments_and_methods() -> None:
    class Model:
        @functools.partial(scalify, static_argnums=(0, 2))
        def apply(self, x: jax.Array, n: int, *, bias: jax.Array) -> jax.Array:
            return jnp.abs(x) * n + bias

    result = Model().apply(as_scaled(jnp.ones(2)), 2, bias=jnp.ones(2))
    np.testing.assert_array_equal(result.value, 3.0)


def test_what_is_no_array_is_part_of_the_program() -> None:
    def program(x: jax.Array, function: Any, axis: int, mode: str, dtype: Any = None) -> jax.Array:
        x = function(x) if mode == "applied" else x
        return x.sum(axis).astype(dtype)

    x = as_scaled(jnp.arange(6.0).reshape(2, 3))
    for args, options in (
        ((jnp.tanh, 1, "applied"), {"dtype": jnp.float32}),
        ((None, 0, "as it is", jnp.float32), {}),
    ):
        actual = jax.jit(lambda x, a=args, o=options: scalify(program)(x, *a, **o))(x)
        np.testing.assert_allclose(actual.value, program(x.value, *args, **options), rtol=1e-6)
        assert scalify(program).report(x, *args, **options) == []


def test_shapes_without_arrays() -> None:
    function = scalify(lambda x: lax.map(jnp.sum, jax.nn.softmax(x @ x.T)))
    x = as_scaled(jnp.ones((3, 4)), dtype=jnp.float16)
    shapes, (n,) = jax.eval_shape(lambda: x), jax.export.symbolic_shape("n")
    unknown = jax.tree.map(lambda leaf: leaf.update(shape=(n, 4) if leaf.ndim else ()), shapes)
    for given in (x, shapes, unknown):
        (out,) = jax.make_jaxpr(function)(given).out_avals[:1]
        assert (out.shape, out.dtype) == (given.shape[:1], jnp.float16)
    assert jax.eval_shape(function, jax.ShapeDtypeStruct((3, 4), jnp.float32)).shape == (3,)


def test_compiled_ahead_of_time_exported_and_donated() -> None:
    def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)

    w, x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), np.ones((2, 4), np.float32)
    args = as_scaled(({"w": jnp.asarray(w)}, jnp.asarray(x)), dtype=jnp.float16)
    program = jax.jit(scalify(step), donate_argnums=0)
    lowered = program.lower(*args)
    exported = jax.export.export(program)(*args)
    shared = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = jax.device_put(as_scaled({"w": jnp.asarray(w)}, dtype=jnp.float16), shared)
    expected = jax.jit(step)({"w": w}, x)["w"]
    for function in (exported.call, lowered.compile()):
        result = function(placed, args[1])["w"]
        assert result.dtype == jnp.float16
        np.testing.assert_allclose(result.value, expected, rtol=2e-3, atol=1e-3)
    assert placed["w"].data.is_deleted()


def test_vmap_of_scalify_takes_the_axes_of_data_and_scale() -> None:
    x = as_scaled(jnp.arange(6.0).reshape(2, 3))
    rows = jax.tree.map(lambda leaf: 0 if leaf.ndim else None, x)
    expected = jax.nn.softmax(x.value)
    for axes, given in ((rows, x), (0, ScaledArray(x.data, jnp.full((2, 1), x.scale)))):
        actual = jax.jit(jax.vmap(scalify(jax.nn.softmax), in_axes=(axes,)))(given)
        np.testing.assert_allclose(to_array(actual), expected, rtol=1e-6)


def reshaped(x: jax.Array, n: int, *, order: str = "C") -> jax.Array:
    return x.reshape(n, -1, order=order)


bad: Any = scalify
test_bad_input = refuses(
    [
        (TypeError, lambda: bad(3), "int"),
        (ValueError, lambda: bad(jnp.sin, static_scaling="rms"), "static_scaling"),
        (TypeError, lambda: bad(jnp.sin, static_scaling=3), "static_scaling"),
        (ValueError, lambda: scalify(scalify(jnp.sin), decouple=True), "already"),
        (ValueError, lambda: scalify(reshaped, static_argnames=("n", "m")), "static_argnames .*m"),
        (ValueError, lambda: scalify(reshaped, static_argnums=2), "static_argnums .*2"),
        (ValueError, lambda: scalify(reshaped, static_argnums=-3), "static_argnums .*-3"),
    ]
)


def test_static_arguments_by_position_and_name() -> None:
    x = as_scaled(jnp.arange(6.0))
    for options in (
        {"static_argnums": -1, "static_argnames": "order"},
        {"static_argnums": (1,), "static_argnames": ["order"]},
        {"static_argnames": ("n", "order")},
    ):
        result = jax.eval_shape(lambda x, o=options: scalify(reshaped, **o)(x, 2, order="F"), x)
        assert result.shape == (2, 3)
    assert scalify(lambda *x, **named: x[0], static_argnums=5, static_argnames="any")(x) is not None


def test_a_function_that_changes_an_object_in_place() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Model:
        w: Any

    def step(models: dict[str, Model], x: jax.Array) -> jax.Array:
        models["b"].w = models["b"].w - x
        return x

    def other(models: dict[str, Any], x: jax.Array) -> Any:
        models["c"] = models.pop("a").w * x  # of a copy, as under jit
        return models

    given = {name: Model(as_scaled(jnp.ones(2))) for name in "ab"}
    for run in (scalify(step), jax.jit(scalify(step)), scalify(step).report):
        with pytest.raises(ValueError, match=r"\['b'\].w.* unitscale.nn.scalify"):
            run(given, jnp.ones(2))
    np.testing.assert_array_equal(to_array(scalify(other)(given, jnp.ones(2))["c"]), 1.0)


DATA = np.asarray([[1.0, -2.0], [0.5, 0.0]], np.float32)


def test_scales_of_results_are_arrays_and_plain_stays_plain() -> None:
    for f in (lambda a: a, lambda a: 0 * a, lambda a: a * 2):
        for scale in (1, jnp.ones((2, 1)), jnp.ones((1,))):
            result = scalify(f)(ScaledArray(DATA, scale))
            assert jax.tree.structure(result) == jax.tree.structure(ScaledArray(DATA, 1))
            np.testing.assert_array_equal(result.value, f(DATA))
    x = as_scaled(jnp.ones(2))
    plain = scalify(lambda a: a)(ScaledArray(DATA, None))
    result = scalify(lambda x, n: (x + 1, n, x * n))(jnp.ones(2), x)
    assert [isinstance(r, ScaledArray) for r in (plain, *result)] == [False, False, True, True]


def test_programs_are_traced_on_values() -> None:
    seen = []
    for dtype in (jnp.float16, jnp.float8_e4m3fn):
        args = as_scaled(DATA, dtype=dtype), jnp.asarray(DATA, dtype)
        scalify(lambda x, y, dtype=dtype: seen.append((x.dtype, y.dtype == dtype)))(*args)
    assert seen == [(jnp.float32, True)] * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_results_are_measured_in_narrow_types_and_at_one_in_others(dtype: str) -> None:
    x = ScaledArray(jnp.full((4, 4), 16.0, dtype), jnp.float32(2.0))
    found = jax.jit(scalify(lambda x: (x @ x / 8, x + x, x, x.T, -x)))(x)
    assert [float(y.scale) for y in found[2:]] == [2.0] * 3
    np.testing.assert_array_equal(found[0].value, 512.0)
    assert float(found[0].scale) == (512.0 if dtype == "float16" else 1.0)
    assert float(found[1].scale) == (64.0 if dtype == "float16" else 1.0)


@pytest.mark.parametrize("target", [lax.add_p, "add", "dot_general", "scan"])
def test_a_primitive_has_one_rule(target: Any) -> None:
    with pytest.raises(ValueError, match=r"has a rule already, in category"):
        register("mine", target)


def test_other_libraries_are_not_asked_for_but_jax_is(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign, own = Primitive("foreign"), Primitive("own")
    rule = functools.partial(lax.add, (lambda *_: None,))
    monkeypatch.setitem(ad.primitive_jvps, foreign, rule)
    assert unlisted() == []
    monkeypatch.setitem(ad.primitive_jvps, own, lax.add)
    assert unlisted() == ["own"]


def test_a_primitive_without_a_rule_takes_the_default() -> None:
    primitive = Primitive("tripled")
    primitive.def_impl(lambda x: x * 3)
    primitive.def_abstract_eval(lambda x: x)
    x = as_scaled(jnp.full(4, 1e-6), dtype=jnp.float16)
    scaled = scalify(lambda a: primitive.bind(a))
    assert float(jnp.max(jnp.abs(to_array(scaled(x)) / x.value - 3))) < 1e-3
    mlir.register_lowering(primitive, mlir.lower_fun(lambda v: v * 3, multiple_results=False))
    assert [d.primitive for d in scaled.report(x)] == ["tripled"]


def test_every_differentiable_primitive_is_listed() -> None:
    """Primitives of Pallas do not count, although it is imported."""
    importlib.import_module("jax.experimental.pallas.ops.tpu.splash_attention")
    assert unlisted() == []
    assert all(name in coverage() for name in ("`dot_general`", "`scan`", "`custom_vjp_call`"))

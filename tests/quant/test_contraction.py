"""One rule for the product of two ScaledArrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unitscale.core import ScaledArray
from unitscale.quant import Block, Contraction, product, quantize

SPEC = Contraction("bk", "kn", "nb")
RNG = np.random.default_rng(0)
LHS, RHS = (RNG.integers(-8, 9, shape).astype(np.float32) for shape in ((3, 8), (8, 4)))


def whole(x: np.ndarray, scale) -> ScaledArray:
    return ScaledArray(jnp.asarray(x, jnp.float8_e4m3fn), scale)


SCALES = {
    "none": (None, None),
    "one": (1, 1),
    "numbers": (4.0, 0.5),
    "per row": (2.0 ** np.arange(3)[:, None], 1),
    "per column": (1, 2.0 ** np.arange(4)[None]),
    "both": (2.0 ** np.arange(3)[:, None], 2.0 ** -np.arange(4)[None]),
    "along the sum": (2.0 ** np.arange(8)[None], 2.0),
}


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", SCALES)
def test_scales_multiply(name: str, out: str) -> None:
    scales = (None if s is None else jnp.asarray(s) if np.ndim(s) else s for s in SCALES[name])
    lhs, rhs = (whole(x, s) for x, s in zip((LHS, RHS), scales, strict=True))
    values = np.float64(lhs.value), np.float64(rhs.value)
    expected = 0.25 * np.einsum("bk,kn->nb", *values)
    y = product(lhs, rhs, SPEC, 0.25, out)
    assert y.dtype == out
    np.testing.assert_allclose(np.float64(y), expected, rtol=float(jnp.finfo(out).eps))


def test_a_plain_array_with_a_scaled_one() -> None:
    y = product(whole(LHS, 4.0), jnp.asarray(RHS), SPEC, 1.0, "float32")
    np.testing.assert_array_equal(y, 4 * (LHS @ RHS).T)


def test_blocks_go_into_the_data() -> None:
    lhs, rhs = (
        quantize(jnp.asarray(x * 1e-3), "e4m3fn", Block(3), axis=axis)
        for x, axis in ((LHS, 1), (RHS, 0))
    )
    expected = np.einsum("bk,kn->nb", np.float64(lhs.value), np.float64(rhs.value))
    np.testing.assert_allclose(
        product(lhs, rhs, SPEC, 1.0, "float32"), expected, rtol=1e-5, atol=1e-9
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scales_whose_product_overflows(dtype: str) -> None:
    """Beside a value that overflows, a zero stays a zero."""
    operands = (np.asarray(x, dtype) for x in ([[1.0], [0.0]], [[1.0]]))
    lhs, rhs = (whole(x, 2.0**100) for x in operands)
    y = product(lhs, rhs, Contraction("bk", "kn", "bn"), 1.0, dtype)
    assert y[0, 0] > 2.0**127
    assert y[1, 0] == 0


def test_an_operand_has_a_dimension_per_label() -> None:
    with pytest.raises(
        ValueError, match=r"an operand 'kn' must have 2 dimensions; got shape \(3,\)"
    ):
        product(jnp.ones((2, 3)), jnp.ones(3), Contraction("bk", "kn", "bn"), 1.0, "float32")


def test_products_are_emitted_in_the_direct_form() -> None:
    """The dot of what is stored, then one multiplication: a bfloat16 by all scales and factors."""
    lhs, rhs = whole(LHS, jnp.float32(4)), whole(RHS, jnp.float32(8))
    jaxpr = jax.make_jaxpr(lambda a, b: product(a, b, SPEC, 0.25, "bfloat16"))(lhs, rhs)
    names = [e.primitive.name for e in jaxpr.eqns]
    dot, mul = names.index("dot_general"), len(names) - 1
    assert names[mul] == "mul"
    assert [v.aval.dtype.name for v in jaxpr.eqns[dot].invars] == ["float8_e4m3fn"] * 2
    # Before the last, scales of no dimension only.
    others = [
        e for e, n in zip(jaxpr.eqns, names, strict=True) if n not in ("dot_general", "transpose")
    ]
    assert all(v.aval.shape == () for e in others[:-1] for v in e.outvars)
    assert [v.aval.dtype.name for v in jaxpr.eqns[mul].invars] == ["bfloat16"] * 2


def test_contraction_names_its_sum() -> None:
    assert Contraction("abk", "kan", "bn").summed == "ak"
    assert SPEC.grad_lhs.summed == "n"


def test_scales_out_of_range_whose_product_is_not() -> None:
    """2^100 * 2^100 * 2^-80 is 2^120, in any order of these factors."""
    lhs, rhs = whole(LHS, jnp.float32(2.0**100)), whole(RHS, jnp.float32(2.0**100))
    near = product(whole(LHS, 1), whole(RHS, 1), SPEC, 2.0**-20, "float32")
    far = jax.jit(lambda a, b: product(a, b, SPEC, 2.0**-120, "float32"))(lhs, rhs)
    np.testing.assert_array_equal(far, near * 2.0**100)
    lhs, rhs = whole(LHS, jnp.float32(2.0**-100)), whole(RHS, jnp.float32(2.0**-100))
    far = jax.jit(lambda a, b: product(a, b, SPEC, 2.0**120, "float32"))(lhs, rhs)
    np.testing.assert_array_equal(far, near * 2.0**-60)


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        (Contraction("btk", "btn", "kn"), (3, 5)),
        (Contraction("btkl", "btn", "kln"), (3, 5)),
        (Contraction("sbtk", "sbtn", "kn"), (2, 3, 5)),
        (Contraction("btk", "btn", "kn"), (0, 5)),
    ],
)
def test_rows_are_summed_together_on_one_cpu_alone(
    spec: Contraction, rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight's gradient: over one dimension of rows there, over those given elsewhere."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    sizes = dict(zip("kln", (7, 4, 2), strict=True))
    x, y = (
        RNG.normal(size=(*rows, *(sizes[c] for c in labels[len(rows) :]))).astype(np.float32)
        for labels in (spec.lhs, spec.rhs)
    )

    def gradient(x: jax.Array, y: jax.Array) -> jax.Array:
        return product(x, y, spec, 0.5, "float32")

    expected = 0.5 * np.einsum(f"{spec.lhs},{spec.rhs}->{spec.out}", x, y, dtype=np.float64)
    np.testing.assert_allclose(gradient(x, y), expected, rtol=1e-5, atol=1e-5)
    for platform, count in (("cpu", 1), ("gpu", len(rows))):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        text = jax.jit(lambda x, y: gradient(x, y)).lower(x, y).as_text()
        summed = [*range(count)]
        assert f"contracting_dims = {summed} x {summed}" in text


def test_rows_that_devices_may_share_are_not_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their dimensions may be sharded each over its own axis."""
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    x = y = np.ones((4, 2, 3), np.float32)
    spec = Contraction("btk", "btn", "kn")
    text = jax.jit(lambda x, y: product(x, y, spec, 1.0, "float32")).lower(x, y).as_text()
    assert "contracting_dims = [0, 1] x [0, 1]" in text


@pytest.mark.parametrize(
    ("terms", "label"),
    [(("bkm", "kn", "bn"), "m"), (("bk", "kn", "bz"), "n"), (("bb", "bn", "n"), "b")],
)
def test_a_label_stands_once_in_two_terms(terms: tuple[str, ...], label: str) -> None:
    with pytest.raises(ValueError, match=f"every label .* got '{label}' in"):
        Contraction(*terms)

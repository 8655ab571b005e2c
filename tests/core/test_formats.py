"""Facts of the formats against their layouts."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from unitscale.core import Format, format_of, wide_dtype

from .grids import LAYOUTS, ieee


def _facts(fmt: Format) -> tuple[float, ...]:
    return fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.mantissa_bits


@pytest.mark.parametrize("name", LAYOUTS)
def test_facts_are_those_of_the_layout(name: str) -> None:
    layout, fmt = LAYOUTS[name], format_of(name)
    grid = layout.values()
    normal = grid[2**layout.mantissa_bits]
    assert _facts(fmt) == (grid[-1], normal, grid[1], layout.mantissa_bits)
    assert fmt.exponent_bits == layout.exponent_bits
    assert fmt.name == name
    assert 2.0**fmt.min_exponent == normal
    assert fmt.eps == grid[np.searchsorted(grid, 1) + 1] - 1
    assert fmt.has_inf == np.isinf(layout.overflow)
    assert fmt.has_nan == (name[:6] not in ("float6", "float4"))
    assert fmt.signed


@pytest.mark.parametrize("name", LAYOUTS)
def test_only_formats_with_arrays_have_a_dtype(name: str) -> None:
    fmt = format_of(name)
    assert fmt.simulated == name.startswith("float6")
    if not fmt.simulated:
        assert jnp.zeros(1, fmt.dtype).dtype == fmt.dtype


def test_e8m0_has_powers_of_two_only() -> None:
    fmt = format_of("e8m0")
    assert (fmt.max, fmt.smallest_normal, fmt.mantissa_bits) == (2.0**127, 2.0**-127, 0)
    assert (fmt.signed, fmt.has_inf, fmt.has_nan) == (False, False, True)


@pytest.mark.parametrize(
    ("simulated", "real"),
    [("E4M3", "float8_e4m3"), ("E5M2", "float8_e5m2"), ("E3M4", "float8_e3m4"),
     ("E5M10", "float16"), ("E8M7", "bfloat16"), ("E8M23", "float32")],
)  # fmt: skip
def test_simulated_formats_have_the_facts_of_the_real_ones(simulated: str, real: str) -> None:
    fmt = format_of(simulated)
    assert _facts(fmt) == _facts(format_of(real))
    assert fmt.simulated
    assert fmt.dtype is None
    assert fmt.has_inf


@pytest.mark.parametrize("bits", [(2, 0), (2, 5), (6, 9), (8, 0)])
def test_any_simulated_layout(bits: tuple[int, int]) -> None:
    fmt, grid = format_of("E{}M{}".format(*bits)), ieee(*bits).values()
    assert (fmt.max, fmt.smallest_subnormal) == (grid[-1], grid[1])


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("e4m3fn", "float8_e4m3fn"), ("e5m2", "float8_e5m2"), ("e4m3", "float8_e4m3"),
     ("e8m0", "float8_e8m0fnu"), ("e2m1", "float4_e2m1fn"), ("e2m3", "float6_e2m3fn"),
     ("e3m2", "float6_e3m2fn"), ("half", "float16"), (jnp.bfloat16, "bfloat16"),
     (np.dtype("float16"), "float16"), (np.float32, "float32"), (float, "float64"),
     (ml_dtypes.float8_e5m2fnuz, "float8_e5m2fnuz"), ("e4m3b11fnuz", "float8_e4m3b11fnuz"),
     (ml_dtypes.float6_e2m3fn, "float6_e2m3fn")],
)  # fmt: skip
def test_spellings(spelling: object, name: str) -> None:
    assert format_of(spelling).name == name
    assert format_of(format_of(spelling)) is format_of(spelling)


@pytest.mark.parametrize(
    ("spelling", "message"),
    [("int8", "expected a floating-point format; got int8"),
     (complex, "got complex128"), (bool, "got bool"), (None, "got None"),
     ("float9", "'float9' is not a floating-point format"), (3, "3 is not a floating-point"),
     ("E9M3", r"2 <= e <= 8 .* got E9M3"), ("E1M3", "got E1M3"), ("E4M24", "got E4M24"),
     ("finfo", "floating-point format")],
)  # fmt: skip
def test_other_types_are_refused(spelling: object, message: str) -> None:
    with pytest.raises(ValueError, match=rf"unitscale\.core\.format_of: .*{message}"):
        format_of(spelling)


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [("float16", "float32"), (jnp.float8_e5m2, "float32"), (jnp.bfloat16, "float32"),
     ("float32", "float32"), ("float64", "float64"), ("int32", "float32")],
)  # fmt: skip
def test_wide_dtype(dtype: object, wide: str) -> None:
    assert wide_dtype(dtype).name == wide

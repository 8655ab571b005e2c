"""What `trace_scales` records, against the same statistics taken in NumPy."""

import numpy as np
import pytest

from unitscale.core import format_of


def check(record, values, formats=("float16", "float8_e4m3fn", "float8_e5m2"), rtol=1e-5) -> None:
    size = np.abs(np.asarray(values, np.float64))
    np.testing.assert_allclose(record.rms, np.sqrt(np.mean(size**2)), rtol=rtol)
    np.testing.assert_allclose(record.amax, size.max(initial=0.0), rtol=1e-6)
    assert record.zeros == pytest.approx(np.mean(size == 0))
    assert set(record.formats) == set(formats)
    for name, shares in record.formats.items():
        f = format_of(name)
        lost = size <= f.smallest_subnormal / 2
        assert shares.zero == pytest.approx(np.mean(lost))
        assert shares.subnormal == pytest.approx(np.mean((size < f.smallest_normal) & ~lost))
        assert shares.saturated == pytest.approx(np.mean(size > f.max))


def named(trace, primitive, backward=False):
    return [r for r in trace if r.primitive == primitive and r.backward is backward]

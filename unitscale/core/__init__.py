"""ScaledArray and what it is made of: formats, exact powers of two, saturating casts.

Everything else in the library stands on this package, which needs jax, numpy and ml_dtypes only.
"""

from ._arithmetic import is_zero as is_zero, result_dtype as result_dtype
from ._cast import CastRounding as CastRounding, cast as cast, narrow as narrow, widen as widen
from ._convert import (
    as_scaled as as_scaled,
    is_scaled as is_scaled,
    to_array as to_array,
    widen_data as widen_data,
)
from ._factor import (
    multiply as multiply,
    scale as scale,
    scale_bwd as scale_bwd,
    scale_fwd as scale_fwd,
)
from ._formats import Format as Format, format_of as format_of, wide_dtype as wide_dtype
from ._pow2 import (
    Rounding as Rounding,
    exponent_of as exponent_of,
    pow2 as pow2,
    round_to_pow2 as round_to_pow2,
    static_pow2 as static_pow2,
    static_pow2_sqrt as static_pow2_sqrt,
)
from ._rescale import RescaleStrategy as RescaleStrategy, rebalance as rebalance, rescale as rescale
from ._scale import (
    Scale as Scale,
    as_scale as as_scale,
    common_scale as common_scale,
    divide_scales as divide_scales,
    is_static as is_static,
    multiply_scales as multiply_scales,
    safe_scale as safe_scale,
    to_float as to_float,
)
from ._scaled_array import ScaledArray as ScaledArray
from ._statistics import amax as amax, optimal_scale as optimal_scale, rms as rms
from ._vjp import custom_vjp as custom_vjp

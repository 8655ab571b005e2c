"""ScaledArray and what it is made of: formats, exact powers of two, saturating casts.

Everything else in the library stands on this package, which needs jax, numpy and ml_dtypes only.
"""

from . import _export as _export
from ._arithmetic import result_dtype as result_dtype
from ._batch import (
    batch_over as batch_over,
    batch_size as batch_size,
    batch_size_override as batch_size_override,
    global_batch_size as global_batch_size,
    num_batch_shards as num_batch_shards,
)
from ._cast import (
    CastRounding as CastRounding,
    cast as cast,
    materialize as materialize,
    narrow as narrow,
    upcast as upcast,
    widen as widen,
)
from ._compat import cudnn_of as cudnn_of, scan_counts as scan_counts
from ._convert import (
    as_scaled as as_scaled,
    is_scaled as is_scaled,
    to_array as to_array,
)
from ._export import from_json as from_json, to_json as to_json
from ._factor import (
    multiply as multiply,
    scale as scale,
    scale_bwd as scale_bwd,
    scale_fwd as scale_fwd,
)
from ._float8 import (
    decode_float8 as decode_float8,
    encode_float8 as encode_float8,
    is_float8 as is_float8,
)
from ._formats import Format as Format, format_of as format_of, wide_dtype as wide_dtype
from ._gradients import (
    drop_value as drop_value,
    grad as grad,
    loss_value as loss_value,
    map_values as map_values,
    value_and_grad as value_and_grad,
    value_gradient as value_gradient,
    wide_data as wide_data,
    with_data as with_data,
)
from ._last_uses import last_uses as last_uses
from ._mesh_axes import (
    BATCH_AXES as BATCH_AXES,
    CONTEXT_AXES as CONTEXT_AXES,
    TENSOR_AXES as TENSOR_AXES,
    axes_size as axes_size,
    batch_axes as batch_axes,
    constrain_sharding as constrain_sharding,
    dividing_axes as dividing_axes,
    reshard as reshard,
    shard_activations as shard_activations,
)
from ._noise import dithered as dithered
from ._pow2 import (
    Rounding as Rounding,
    exponent_of as exponent_of,
    normal_pow2 as normal_pow2,
    pow2 as pow2,
    round_to_pow2 as round_to_pow2,
    static_pow2 as static_pow2,
    static_pow2_sqrt as static_pow2_sqrt,
)
from ._rescale import RescaleStrategy as RescaleStrategy, rebalance as rebalance, rescale as rescale
from ._scale import (
    Scale as Scale,
    as_scale as as_scale,
    bounded_product as bounded_product,
    broadcasts as broadcasts,
    common_scale as common_scale,
    safe_scale as safe_scale,
    scale_near as scale_near,
    to_float as to_float,
)
from ._scaled_array import ScaledArray as ScaledArray
from ._statistics import amax as amax, optimal_scale as optimal_scale, rms as rms
from ._vjp import custom_vjp as custom_vjp, match_varying as match_varying, varying as varying

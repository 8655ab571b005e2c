"""ScaledArray and what it is made of: formats, exact powers of two, saturating casts.

Everything else in the library builds on this package, which needs jax, numpy and ml_dtypes only.
"""

# For users.
from ._autodiff import (
    grad as grad,
    map_values as map_values,
    scale as scale,
    scale_bwd as scale_bwd,
    scale_fwd as scale_fwd,
    value_and_grad as value_and_grad,
)
from ._cast import CastRounding as CastRounding, cast as cast
from ._convert import (
    RescaleStrategy as RescaleStrategy,
    amax as amax,
    as_scaled as as_scaled,
    is_scaled as is_scaled,
    optimal_scale as optimal_scale,
    rebalance as rebalance,
    rescale as rescale,
    rms as rms,
    to_array as to_array,
)
from ._formats import Format as Format, format_of as format_of
from ._scale import Rounding as Rounding, Scale as Scale, round_to_pow2 as round_to_pow2
from ._scaled_array import ScaledArray as ScaledArray
from ._sharding import batch_over as batch_over, batch_size as batch_size

# isort: split
# For the other packages of the library.
from ._arithmetic import result_dtype as result_dtype
from ._autodiff import (
    drop_value as drop_value,
    loss_value as loss_value,
    multiply as multiply,
    value_gradient as value_gradient,
    wide_data as wide_data,
    with_data as with_data,
)
from ._cast import (
    decode_float8 as decode_float8,
    dithered as dithered,
    encode_float8 as encode_float8,
    is_float8 as is_float8,
    materialize as materialize,
    narrow as narrow,
    upcast as upcast,
    widen as widen,
)
from ._compat import (
    cudnn_accepts_float32 as cudnn_accepts_float32,
    cudnn_of as cudnn_of,
    custom_vjp as custom_vjp,
    last_uses as last_uses,
    match_varying as match_varying,
    scan_counts as scan_counts,
    varying as varying,
)
from ._convert import from_json as from_json, to_json as to_json
from ._formats import wide_dtype as wide_dtype
from ._scale import (
    as_scale as as_scale,
    bounded_product as bounded_product,
    broadcasts as broadcasts,
    common_scale as common_scale,
    exponent_of as exponent_of,
    normal_pow2 as normal_pow2,
    pow2 as pow2,
    safe_scale as safe_scale,
    scale_near as scale_near,
    static_pow2 as static_pow2,
    static_pow2_sqrt as static_pow2_sqrt,
    to_float as to_float,
)
from ._sharding import (
    BATCH_AXES as BATCH_AXES,
    CONTEXT_AXES as CONTEXT_AXES,
    TENSOR_AXES as TENSOR_AXES,
    axes_size as axes_size,
    batch_axes as batch_axes,
    batch_size_override as batch_size_override,
    constrain_sharding as constrain_sharding,
    dividing_axes as dividing_axes,
    global_batch_size as global_batch_size,
    num_batch_shards as num_batch_shards,
    reshard as reshard,
    shard_activations as shard_activations,
)

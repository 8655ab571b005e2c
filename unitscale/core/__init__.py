"""ScaledArray, and the tools it builds on: formats, exact powers of two, casts, scale arithmetic.

The rest of the library builds on this package, which needs only jax, numpy and ml_dtypes.
"""

from ._scaled_array import ScaledArray as ScaledArray, is_scaled as is_scaled  # Scaled arrays
from ._convert import as_scaled as as_scaled, to_array as to_array, map_values as map_values
from ._convert import (  # Scales
    rescale as rescale,
    rebalance as rebalance,
    RescaleStrategy as RescaleStrategy,
    amax as amax,
    rms as rms,
)
from ._formats import round_to_pow2 as round_to_pow2, Rounding as Rounding
from ._arithmetic import Scale as Scale
from ._formats import (  # Formats and casts
    cast as cast,
    CastRounding as CastRounding,
    Format as Format,
    format_of as format_of,
)
from ._autodiff import (  # Differentiation
    grad as grad,
    value_and_grad as value_and_grad,
)
from ._sharding import batch_size as batch_size, batch_over as batch_over  # Batch size

# For the other packages of the library.
from ._arithmetic import (
    MAX_EXPONENT as MAX_EXPONENT,
    as_scale as as_scale,
    bounded_product as bounded_product,
    broadcasts as broadcasts,
    common_scale as common_scale,
    result_dtype as result_dtype,
    safe_scale as safe_scale,
    scale_near as scale_near,
    to_float as to_float,
)
from ._autodiff import (
    drop_value as drop_value,
    gradient_probe as gradient_probe,
    multiply as multiply,
    scale as scale,
    scale_bwd as scale_bwd,
    scale_fwd as scale_fwd,
    value_gradients as value_gradients,
    with_probe as with_probe,
)
from ._compat import (
    cudnn_accepts_float32 as cudnn_accepts_float32,
    cudnn_of as cudnn_of,
    custom_vjp as custom_vjp,
    gpu_capability as gpu_capability,
    last_uses as last_uses,
    match_varying as match_varying,
    scan_counts as scan_counts,
    varying as varying,
)
from ._convert import (
    exponent_to_fit as exponent_to_fit,
    from_json as from_json,
    scale_to_fit as scale_to_fit,
    to_json as to_json,
)
from ._formats import (
    check_choice as check_choice,
    dithered as dithered,
    exponent_of as exponent_of,
    gradients_format as gradients_format,
    is_float8 as is_float8,
    is_floating as is_floating,
    materialize as materialize,
    narrow as narrow,
    narrow_gradients as narrow_gradients,
    normal_pow2 as normal_pow2,
    pow2 as pow2,
    storage_of as storage_of,
    upcast as upcast,
    weight_gradient_dtype as weight_gradient_dtype,
    wide_dtype as wide_dtype,
    widen as widen,
)
from ._scaled_array import loss_value as loss_value
from ._sharding import (
    BATCH_AXES as BATCH_AXES,
    CONTEXT_AXES as CONTEXT_AXES,
    TENSOR_AXES as TENSOR_AXES,
    auto_axes as auto_axes,
    axes_size as axes_size,
    batch_axes as batch_axes,
    batch_size_override as batch_size_override,
    constrain_sharding as constrain_sharding,
    dividing_axes as dividing_axes,
    exchange_in as exchange_in,
    fsdp_devices as fsdp_devices,
    fsdp_dimension as fsdp_dimension,
    global_batch_size as global_batch_size,
    num_batch_shards as num_batch_shards,
    parts_to_exchange as parts_to_exchange,
    reshard as reshard,
    reshard_bits as reshard_bits,
    shard_activations as shard_activations,
    sum_parts as sum_parts,
)

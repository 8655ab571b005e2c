"""`scalify`: scale propagation through any JAX program, with markers that guide it."""

from . import (
    _rules_arrays as _rules_arrays,
    _rules_calls as _rules_calls,
    _rules_contractions as _rules_contractions,
    _rules_custom as _rules_custom,
    _rules_devices as _rules_devices,
    _rules_loops as _rules_loops,
)
from ._interpreter import (
    Default as Default,
    coverage as coverage,
    register as register,
    unlisted as unlisted,
)
from ._markers import (
    cast_data as cast_data,
    dynamic_rescale as dynamic_rescale,
    get_data_scale as get_data_scale,
    set_scaling as set_scaling,
    stop_scaling as stop_scaling,
)
from ._scalify import Scalified as Scalified, scalify as scalify

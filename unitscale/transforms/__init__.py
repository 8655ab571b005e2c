"""`scalify`: scale propagation through any JAX program, with markers that guide it."""

from . import (
    _rules_arrays as _rules_arrays,
    _rules_calls as _rules_calls,
    _rules_contractions as _rules_contractions,
    _rules_custom as _rules_custom,
    _rules_devices as _rules_devices,
    _rules_loops as _rules_loops,
)
from ._scalify import scalify as scalify, Scalified as Scalified  # Scale propagation
from ._markers import (  # Markers
    set_scaling as set_scaling,
    dynamic_rescale as dynamic_rescale,
    cast_data as cast_data,
    get_data_scale as get_data_scale,
    stop_scaling as stop_scaling,
)
from ._interpreter import (  # Rules
    coverage as coverage,
    unlisted as unlisted,
    register as register,
    Default as Default,
)

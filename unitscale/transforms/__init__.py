"""`scalify`: scale propagation through any JAX program, with markers that guide it."""

from . import (
    _rules_calls as _rules_calls,
    _rules_carriers as _rules_carriers,
    _rules_casts as _rules_casts,
    _rules_comparisons as _rules_comparisons,
    _rules_cond as _rules_cond,
    _rules_custom as _rules_custom,
    _rules_default as _rules_default,
    _rules_devices as _rules_devices,
    _rules_functions as _rules_functions,
    _rules_loops as _rules_loops,
    _rules_products as _rules_products,
    _rules_ratios as _rules_ratios,
    _rules_sums as _rules_sums,
)
from ._align import Aligned as Aligned, align as align
from ._coverage import coverage as coverage, coverage_page as coverage_page
from ._decouple import Branch as Branch
from ._doubt import Doubt as Doubt
from ._dynamic import Statistic as Statistic
from ._markers import (
    Direction as Direction,
    cast_data as cast_data,
    dynamic_rescale as dynamic_rescale,
    get_data_scale as get_data_scale,
    set_scaling as set_scaling,
    stop_scaling as stop_scaling,
)
from ._registry import (
    Rule as Rule,
    register as register,
    unlisted as unlisted,
)
from ._report import Default as Default, Exponent as Exponent, Report as Report
from ._scalify import Scalified as Scalified, decoupled as decoupled, scalify as scalify
from ._settle import finish as finish
from ._strategies import (
    STRATEGIES as STRATEGIES,
    ScaleRounding as ScaleRounding,
    StaticScaling as StaticScaling,
    growth_of as growth_of,
)
from ._values import Value as Value, data_dtype as data_dtype, scale_of as scale_of

"""Every function of the table: value and gradient under scalify are those of the plain one."""

from .law import law
from .table import (
    ACTIVATIONS,
    CASTS,
    COMPARISONS,
    FFT,
    FUNCTIONS,
    LINEAR_ALGEBRA,
    PRODUCTS,
    RANDOM,
    RATIOS,
    REDUCTIONS,
    SHAPES,
    SPECIAL,
)
from .table_control import CALLS, CONDS, CUSTOM, LOOPS, PROGRAMS

test_value_and_gradient_of_functions = law([*FUNCTIONS, *ACTIVATIONS, *SPECIAL, *RANDOM])
test_value_and_gradient_of_movers_and_casts = law([*SHAPES, *CASTS, *FFT, *COMPARISONS])
test_value_and_gradient_of_sums_and_products = law(
    [*REDUCTIONS, *RATIOS, *PRODUCTS, *LINEAR_ALGEBRA]
)
test_value_and_gradient_of_control_flow = law([*CALLS, *CONDS, *LOOPS, *CUSTOM, *PROGRAMS])

"""Analyze the scales, factors and number formats of a program.

`trace_scales` measures every value of a program. `check_gradients` verifies that every gradient is
a constant times the true one, and `cut_edges` finds where a backward factor may be chosen freely.
Both ideas are from Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257. Tables need rich,
and plots need matplotlib: `pip install rich matplotlib`.
"""

from ._cut_edges import (
    CutEdges as CutEdges,
    Input as Input,
    Intermediate as Intermediate,
    cut_edges as cut_edges,
)
from ._fit_factors import FittedFactors as FittedFactors, fit_factors as fit_factors
from ._gradients import (
    GradientReport as GradientReport,
    Guilty as Guilty,
    ParameterGradient as ParameterGradient,
    check_gradients as check_gradients,
)
from ._program import Source as Source
from ._snr import plot_snr as plot_snr, snr as snr
from ._trace_scales import (
    FormatShares as FormatShares,
    ScaleRecord as ScaleRecord,
    ScaleTrace as ScaleTrace,
    trace_scales as trace_scales,
)

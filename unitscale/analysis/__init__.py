"""Analyze the scales, factors and number formats of a program.

`trace_scales` measures every value of a program. `check_gradients` verifies that every gradient is
a constant times the true one, and `cut_edges` finds where a backward factor may be chosen freely.
Both ideas are from Blake, Orr, Luschi, "Unit Scaling", 2023, arXiv 2303.11257. Tables need rich,
and plots need matplotlib: `pip install rich matplotlib`.
"""

from ._trace_scales import (  # Scales of a program
    trace_scales as trace_scales,
    ScaleTrace as ScaleTrace,
    ScaleRecord as ScaleRecord,
    FormatShares as FormatShares,
)
from ._program import Source as Source
from ._gradients import (  # Gradients
    check_gradients as check_gradients,
    GradientReport as GradientReport,
    ParameterGradient as ParameterGradient,
    Guilty as Guilty,
)
from ._cut_edges import (
    cut_edges as cut_edges,
    CutEdges as CutEdges,
    Input as Input,
    Intermediate as Intermediate,
)
from ._fit_factors import fit_factors as fit_factors, FittedFactors as FittedFactors  # Factors
from ._snr import snr as snr, plot_snr as plot_snr  # Formats

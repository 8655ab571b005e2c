"""See what the factors and number formats of a program do.

`cut_edges` shows where backward factors are free, and `check_gradients` proves that those in use
leave every gradient a constant times the truth. `trace_scales` measures each value of a program.
Tables need rich and plots matplotlib: `pip install rich matplotlib`.
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

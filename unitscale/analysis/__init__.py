"""Seeing what the factors and formats of a program do.

`cut_edges` shows where backward factors are free, and `check_gradients` proves that those in use
leave every gradient a constant times the truth. `trace_scales` measures each value of a program.
`fit_factors` simulates the factors of an op that has no rule yet, and `snr` says what a format
makes of values at a scale. `compile_h200` gives the program that an H200 would run, and `roofline`
projects where the time of a program would go. Tables need rich and plots matplotlib:
`pip install "unitscale[recipes]"`.
"""

from ._blame import Guilty as Guilty
from ._cut_edges import (
    CutEdges as CutEdges,
    Input as Input,
    Intermediate as Intermediate,
    cut_edges as cut_edges,
)
from ._device import H200 as H200, Device as Device
from ._fit_factors import FittedFactors as FittedFactors, fit_factors as fit_factors
from ._gradients import (
    GradientReport as GradientReport,
    ParameterGradient as ParameterGradient,
    check_gradients as check_gradients,
)
from ._h200 import (
    compile_h200 as compile_h200,
    h200_available as h200_available,
    h200_topology as h200_topology,
)
from ._projection import Kernel as Kernel
from ._roofline import Roofline as Roofline, Total as Total, roofline as roofline
from ._scale_trace import (
    FormatShares as FormatShares,
    ScaleRecord as ScaleRecord,
    ScaleTrace as ScaleTrace,
)
from ._snr import plot_snr as plot_snr, snr as snr
from ._source import Source as Source
from ._trace_scales import ScaleTracer as ScaleTracer, trace_scales as trace_scales

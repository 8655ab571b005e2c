"""Quantized matmuls: scaling strategies and formats, one matmul core, amax state, FP8 reports.

Nothing here depends on layers or unit-scaling rules: factors come in as static numbers.
"""

from ._check import (
    Fp8Report as Fp8Report,
    Fp8Warning as Fp8Warning,
    Matmul as Matmul,
    check_fp8 as check_fp8,
)
from ._config import (
    PRESETS as PRESETS,
    Block as Block,
    Delayed as Delayed,
    Dynamic as Dynamic,
    Granularity as Granularity,
    MatmulConfig as MatmulConfig,
    Static as Static,
    Strategy as Strategy,
    Unit as Unit,
    Use as Use,
    is_stateful as is_stateful,
)
from ._grouped import group_of as group_of, grouped as grouped
from ._hlo import (
    HloInstruction as HloInstruction,
    HloProgram as HloProgram,
    bits as bits,
    contracted as contracted,
    parse_hlo as parse_hlo,
    user_line as user_line,
)
from ._matmul import (
    Contraction as Contraction,
    Multiplier as Multiplier,
    contract as contract,
    contraction_of as contraction_of,
    dot_general as dot_general,
    einsum as einsum,
    einsum_contraction as einsum_contraction,
    einsum_problem as einsum_problem,
    fake_quantize_operands as fake_quantize_operands,
    multiply as multiply,
    product as product,
)
from ._quantize import (
    MAX_EXPONENT as MAX_EXPONENT,
    dequantize as dequantize,
    fake_quantize as fake_quantize,
    quantize as quantize,
    quantize_at as quantize_at,
    tensor_scale as tensor_scale,
)
from ._state import (
    TENSORS as TENSORS,
    QuantState as QuantState,
    StandingScalesWarning as StandingScalesWarning,
    watched as watched,
)

"""Quantized matmuls: scaling strategies and formats, one matmul core, amax state, FP8 reports.

Nothing here depends on layers or unit-scaling rules: factors come in as static numbers.
"""

from ._check import (
    Fp8Report as Fp8Report,
    HloInstruction as HloInstruction,
    HloProgram as HloProgram,
    Matmul as Matmul,
    bits as bits,
    check_fp8 as check_fp8,
    contracted as contracted,
    parse_hlo as parse_hlo,
    user_line as user_line,
)
from ._config import (
    PRESETS as PRESETS,
    Block as Block,
    Delayed as Delayed,
    Dynamic as Dynamic,
    MatmulConfig as MatmulConfig,
    Static as Static,
    Strategy as Strategy,
    Unit as Unit,
)
from ._grouped import group_of as group_of, grouped as grouped
from ._hooks import (
    contract_for_hook as contract_for_hook,
    contraction_of as contraction_of,
    dot_general as dot_general,
    einsum as einsum,
    einsum_contraction as einsum_contraction,
    einsum_problem as einsum_problem,
)
from ._matmul import (
    Contraction as Contraction,
    Multiplier as Multiplier,
    contract as contract,
    fake_quantize_operands as fake_quantize_operands,
    scaled_matmul as scaled_matmul,
)
from ._quantize import (
    MAX_EXPONENT as MAX_EXPONENT,
    dequantize as dequantize,
    quantize as quantize,
    quantize_at as quantize_at,
    tensor_scale as tensor_scale,
)
from ._state import (
    TENSORS as TENSORS,
    QuantState as QuantState,
    StaleScalesWarning as StaleScalesWarning,
    is_stateful as is_stateful,
    warn_if_not_updated as warn_if_not_updated,
)

"""Quantized matmuls: scaling strategies, formats, amax state, and reports on compiled FP8 kernels.

This package does not depend on layers or scaling rules: callers pass static factors.
"""

from ._config import (  # Formats and strategies
    MatmulConfig as MatmulConfig,
    PRESETS as PRESETS,
    Strategy as Strategy,
    Unit as Unit,
    Static as Static,
    Delayed as Delayed,
    Dynamic as Dynamic,
    Block as Block,
)
from ._check import check_fp8 as check_fp8, Fp8Report as Fp8Report, Matmul as Matmul  # FP8 check
from ._hooks import dot_general as dot_general, einsum as einsum  # Quantized matmuls
from ._matmul import (
    scaled_matmul as scaled_matmul,
    contract as contract,
    Contraction as Contraction,
)
from ._grouped import grouped as grouped
from ._quantize import quantize as quantize, dequantize as dequantize  # Quantize
from ._state import QuantState as QuantState, StaleScalesWarning as StaleScalesWarning  # State

# For the other packages of the library, and for the benchmarks.
from ._check import (
    HloInstruction as HloInstruction,
    HloProgram as HloProgram,
    bits as bits,
    contracted as contracted,
    parse_hlo as parse_hlo,
    user_line as user_line,
)
from ._grouped import group_of as group_of
from ._hooks import (
    contract_for_hook as contract_for_hook,
    contraction_of as contraction_of,
    einsum_contraction as einsum_contraction,
    einsum_problem as einsum_problem,
)
from ._lowering import named_operands as named_operands
from ._matmul import Multiplier as Multiplier, fake_quantize_operands as fake_quantize_operands
from ._quantize import (
    quantize_at as quantize_at,
    tensor_scale as tensor_scale,
)
from ._state import (
    TENSORS as TENSORS,
    is_stateful as is_stateful,
    warn_if_not_updated as warn_if_not_updated,
)

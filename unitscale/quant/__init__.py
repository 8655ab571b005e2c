"""Quantized matrix products: formats, strategies, and the one product rule.

Numerics live here and know nothing of layers or of unit-scaling rules: the factors come in as
static numbers.
"""

from . import _export as _export
from ._amax import MAX_EXPONENT as MAX_EXPONENT, tensor_scale as tensor_scale
from ._check import (
    Fp8Report as Fp8Report,
    Fp8Warning as Fp8Warning,
    Matmul as Matmul,
    check_fp8 as check_fp8,
)
from ._config import MatmulConfig as MatmulConfig
from ._contraction import Contraction as Contraction, product as product
from ._dot_general import (
    contraction_of as contraction_of,
    dot_general as dot_general,
    einsum as einsum,
    multiply as multiply,
)
from ._einsum import einsum_contraction as einsum_contraction, einsum_problem as einsum_problem
from ._fake import fake_quantize_operands as fake_quantize_operands
from ._grouped import group_of as group_of, grouped as grouped
from ._hlo import HloInstruction as HloInstruction, HloProgram as HloProgram, parse_hlo as parse_hlo
from ._kernels import bits as bits, contracted as contracted, user_line as user_line
from ._multiplier import Multiplier as Multiplier
from ._product import contract as contract
from ._quantize import (
    dequantize as dequantize,
    fake_quantize as fake_quantize,
    quantize as quantize,
    quantize_at as quantize_at,
)
from ._state import TENSORS as TENSORS, QuantState as QuantState
from ._strategies import (
    Block as Block,
    Delayed as Delayed,
    Dynamic as Dynamic,
    Granularity as Granularity,
    Static as Static,
    Strategy as Strategy,
    Unit as Unit,
    Use as Use,
    is_stateful as is_stateful,
)
from ._watch import StandingScalesWarning as StandingScalesWarning, watched as watched

"""Quantized matrix products: formats, strategies, and the one product rule.

Numerics live here and know nothing of layers or of unit-scaling rules: the factors come in as
static numbers.
"""

from ._check import (
    Fp8Report as Fp8Report,
    Fp8Warning as Fp8Warning,
    Matmul as Matmul,
    check_fp8 as check_fp8,
)
from ._config import MatmulConfig as MatmulConfig
from ._contraction import Contraction as Contraction, product as product
from ._conversion import Conversion as Conversion, ConversionReport as ConversionReport
from ._convert import convert as convert, restore as restore
from ._dot_general import dot_general as dot_general, einsum as einsum
from ._fake import fake_quantize_operands as fake_quantize_operands
from ._hooks import StaticWeight as StaticWeight
from ._monitor import Overflow as Overflow, OverflowMonitor as OverflowMonitor
from ._nnx import (
    AmaxState as AmaxState,
    DotGeneral as DotGeneral,
    Einsum as Einsum,
    advance as advance,
    amax_state as amax_state,
    amax_states as amax_states,
    calibrate as calibrate,
    read_state as read_state,
    value_and_grad as value_and_grad,
)
from ._presets import PRESETS as PRESETS, ConfigLike as ConfigLike
from ._product import contract as contract
from ._quantize import (
    dequantize as dequantize,
    fake_quantize as fake_quantize,
    quantize as quantize,
)
from ._serve import to_static as to_static
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

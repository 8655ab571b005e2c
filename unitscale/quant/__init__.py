"""Quantized matrix products: formats, strategies, and the one product rule.

Numerics live here and know nothing of layers or of unit-scaling rules: the factors come in as
static numbers.
"""

from ._config import MatmulConfig as MatmulConfig
from ._product import Contraction as Contraction, contract as contract, product as product
from ._quantize import fake_quantize as fake_quantize, quantize as quantize
from ._strategies import Unit as Unit

"""What kind of work a kernel of an optimized program does, and how many operations of products."""

import math
import re
from typing import NamedTuple

from ..parallel._wire import devices_of, group_size
from ..quant import HloInstruction, HloProgram, bits, contracted

ATTENTION, MEMORY, COLLECTIVES = "attention", "memory-bound", "collectives"
ARITHMETIC, LIBRARY = "arithmetic-bound", "library calls"
PRODUCTS = {
    "f8": "FP8 products",
    "16": "16-bit products",
    "32": "32-bit products",
    "32 exact": "exact 32-bit products",
    "64": "64-bit products",
}
KINDS = (*PRODUCTS.values(), ATTENTION, MEMORY, ARITHMETIC, COLLECTIVES, LIBRARY)
"""What kernels are told apart by."""
ELEMENTWISE = (MEMORY, ARITHMETIC)
"""Kernels that XLA makes itself."""

_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-\w+)(-start)?$"
)
# Operations of attention's backward pass over those of the forward one: five products to two.
_BACKWARD = 2.5


class Work(NamedTuple):
    """The work of one run of a kernel.

    Attributes:
        kind: one of `KINDS`.
        format: of the products, as in `Device.flops`; "" if there are none.
        flops: operations of the products.
        wire: bytes that a device sends to others.
    """

    kind: str
    format: str = ""
    flops: float = 0.0
    wire: float = 0.0


def work_of(program: HloProgram, i: HloInstruction) -> Work:
    """Returns what an instruction does when it runs once."""
    if _COLLECTIVE.match(i.opcode):
        return Work(COLLECTIVES, wire=_wire(program, i))
    done = list(program.computations[i.calls[0]].values()) if i.opcode == "fusion" else [i]
    for call in done:  # in a fusion it reads slices of arrays, or writes into one
        if call.opcode == "custom-call":
            return _library(program, call)
    products = [p for p in done if p.opcode in ("dot", "scaled-dot", "convolution")]
    if not products:
        return Work(MEMORY)
    flops = [_product_flops(program, p) for p in products]
    largest = products[flops.index(max(flops))]
    width = _format(program, largest)
    return Work(PRODUCTS[width], width, sum(flops))


def _library(program: HloProgram, i: HloInstruction) -> Work:
    target = i.quoted("custom_call_target")
    if "fmha" in target:
        return Work(ATTENTION, "16", _attention_flops(program, i, "Backward" in target))
    if re.search("gemm|matmul|conv", target, re.IGNORECASE):
        width = _format(program, i)
        return Work(PRODUCTS[width], width, _product_flops(program, i))
    return Work(LIBRARY)


def _shapes(program: HloProgram, i: HloInstruction) -> list[tuple[int, ...]]:
    body = program.computations[i.computation]
    return [body[name].shape for name in i.operands if name in body]


def _format(program: HloProgram, product: HloInstruction) -> str:
    """The format that a product multiplies in: that of its wider operand."""
    body = program.computations[product.computation]
    wide = max(bits(body[name].dtype) for name in product.operands[:2])
    if wide != 32:
        return "f8" if wide <= 8 else str(wide) if wide <= 16 else "64"
    exact = re.search(r"operand_precision\W+highest", product.attributes, re.IGNORECASE)
    return "32 exact" if exact else "32"


def _product_flops(program: HloProgram, i: HloInstruction) -> float:
    left, right, *_ = _shapes(program, i)
    if "dim_labels=" in i.attributes:
        return _convolution_flops(i, left, right)
    if summed := contracted(i):
        return 2.0 * math.prod(i.shape) * math.prod(left[d] for d in summed)
    # (b m k) (b k n) / (b m n) is b k^2.
    batch = math.prod(i.shape[:-2])
    square = math.prod(left) * math.prod(right) / max(math.prod(i.shape) * batch, 1)
    return 2.0 * math.prod(i.shape) * math.sqrt(square)


def _convolution_flops(i: HloInstruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Each value of the output is a sum over a kernel's window and input features."""
    target = i.quoted("custom_call_target")
    output, kernel = i.shape, right
    if target.endswith("BackwardInput"):
        output = left
    elif target.endswith("BackwardFilter"):
        output, kernel = right, i.shape
    labels = re.search(r"dim_labels=\w+_(\w+)->", i.attributes)
    features = kernel[labels[1].index("o")] if labels else 1
    return 2.0 * math.prod(output) * math.prod(kernel) / max(features, 1)


def _attention_flops(program: HloProgram, i: HloInstruction, backward: bool) -> float:
    """Two products over all pairs of a query and a key, half of them where it is causal."""
    q, k, *_ = _shapes(program, i)  # (batch, time, heads, d)
    weights = re.search(r'"intermediate_tensor_shape":\s*\{[^\]]*"(\d+)"\]', i.attributes)
    keys = int(weights[1]) if weights else k[1]
    causal = 0.5 if "CAUSAL" in i.attributes else 1.0
    return 4.0 * math.prod(q) * keys * causal * (_BACKWARD if backward else 1.0)


def _wire(program: HloProgram, i: HloInstruction) -> float:
    """Bytes that a device sends, by the algorithms that send least."""
    body = program.computations[i.computation]
    given = sum(
        math.prod(body[o].shape) * max(bits(body[o].dtype), 8) / 8 for o in i.operands if o in body
    )
    devices = group_size(i.attributes, devices_of(program.header))
    others = 1.0 - 1.0 / devices
    if i.opcode.startswith("all-reduce"):
        return 2 * others * given
    if i.opcode.startswith("all-gather"):
        return given * (devices - 1)
    return given if i.opcode.startswith("collective") else others * given

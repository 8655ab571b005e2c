"""Measurements behind the figures of README.md and the page of results.

`python -m recipes bench NAME` prints one.

Each is a module of this package with a `main` function that typer turns into a command.
"""

# Name to what it measures. Modules are imported when asked for: each pulls in what it measures.
BENCHMARKS = {
    "parity": "validation loss in float16 and FP8 against float32, and underflow of gradients",
    "methods": "loss, lost gradients and cost of loss scales, unit scaling and scalify in float16",
    "libraries": "validation loss of unit scaling and of plain flax.nnx, each at its best rate",
    "overhead": "step time over plain flax.nnx, and the FLOPs that factors add",
    "scalify": "losses, cost and range of plain programs under unitscale.scalify",
    "quant": "loss, FP8 kernels, amax reductions, memory and speed by how scales are chosen",
    "formats": "loss and gradient error by which products and operands are in FP8",
    "h200": "time, memory and FP8 kernels of training steps on an H200, projected without one",
    "gpu": "tests, times, memory and losses on this machine's GPU, beside what is projected",
    "optim": "bytes, step time and validation loss of 16- and 8-bit optimizer state",
    "transfer": "best learning rate by width, under u-muP and in plain flax.nnx",
    "parallel": "bytes, error and validation loss of gradients exchanged in 8 bits",
    "scales": "RMS of activations, weights and gradients at initialisation, by depth and width",
    "trace": "time and memory of a training step under analysis.trace_scales",
    "lms": "losses and scores of language models by format, imported logits, and pipeline speed",
    "mnist": "test accuracy of a classifier under scalify, in each number format",
    "results": "the figures that were measured, as a page, from notebooks/results",
    "fuzz": "random programs on ScaledArrays that agree with float64, values and gradients",
    "flax": "pages of Flax's documentation that run with the layers of unitscale.nn",
}

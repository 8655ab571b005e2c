"""Measurements behind the figures in README.md: `python -m recipes bench NAME`.

Each is a module of this package with a `main` function that typer turns into a command.
"""

# Name to what it measures. Modules are imported when asked for: each pulls in what it measures.
BENCHMARKS = {
    "parity": "validation loss in float16 and FP8 against float32, and underflow of gradients",
    "overhead": "step time over plain flax.nnx, and the FLOPs that factors add",
    "scales": "RMS of activations, weights and gradients at initialisation, by depth and width",
}

"""Speed up the lowering of programs in tests."""

import threading

from jax._src.interpreters import mlir


def keep_mlir_contexts() -> None:
    """Use one MLIR context per thread; JAX makes one per program, with all dialects.

    For a small program that takes longer than to lower it. One that is lowered while another is
    has a context of its own, as its module would be put into the other's.
    """
    make, of_thread = mlir.make_ir_context, threading.local()

    def kept() -> object:
        if mlir.ir.Context.current is not None:
            return make()
        if not hasattr(of_thread, "context"):
            of_thread.context = make()
        return of_thread.context

    mlir.make_ir_context = kept

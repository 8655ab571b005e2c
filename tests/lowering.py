"""Speed up the lowering of programs in tests."""

import threading

from jax._src.interpreters import mlir


def keep_mlir_contexts() -> None:
    """Use one MLIR context per thread; JAX makes one per program, with all dialects.

    For small programs, making a context takes longer than lowering. A program that is lowered
    during the lowering of another still gets its own context, to keep their modules apart.
    """
    make, of_thread = mlir.make_ir_context, threading.local()

    def kept() -> object:
        if mlir.ir.Context.current is not None:
            return make()
        if not hasattr(of_thread, "context"):
            of_thread.context = make()
        return of_thread.context

    mlir.make_ir_context = kept

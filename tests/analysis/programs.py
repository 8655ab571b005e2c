"""Small optimized programs whose bytes and operations are known, as XLA prints them for a GPU."""

from __future__ import annotations

import dataclasses

from unitscale.analysis import H200

AT_ONCE = dataclasses.replace(H200, name="at once", start=1e-15)
"""A GPU whose kernels take no longer than their work: what they do here is small."""


def program(body: str, *computations: str, parameters: str = "x: f32[1024]") -> str:
    """A program whose entry has these instructions, after computations that they call."""
    return "\n\n".join(
        [
            "HloModule jit_f, is_scheduled=true",
            *computations,
            f"ENTRY %main ({parameters}) -> f32[1024] {{\n{body}\n}}\n",
        ]
    )


def fusion(inner: str, *operands: str, result: str, root: str = "f32[8]") -> tuple[str, str]:
    """An instruction of the entry, and the computation of what is fused."""
    names = ", ".join(f"%{name}" for name in operands)
    call = f"  ROOT %out = {result} fusion({names}), kind=kLoop, calls=%fused"
    return call, f"%fused (p: f32[8]) -> {root} {{\n{inner}\n}}"


def parameters(**types: str) -> str:
    """Lines that declare the parameters of a computation."""
    return "\n".join(
        f"  %{name} = {kind} parameter({number})"
        for number, (name, kind) in enumerate(types.items())
    )


def fused(inner: str, result: str, **types: str) -> str:
    """A program that is one fusion of its parameters, which `inner` calls p0, p1 and so on."""
    own = parameters(**{f"p{n}": kind for n, kind in enumerate(types.values())})
    call, computation = fusion(f"{own}\n{inner}", *types, result=result)
    return program(f"{parameters(**types)}\n{call}", computation)


BODY = """\
%body (state: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %state = (s32[], f32[1024]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x.1 = f32[1024]{0} get-tuple-element(%state), index=1
  %y = f32[1024]{0} negate(%x.1), metadata={op_name="jit(f)/while/body/neg"}
  ROOT %next = (s32[], f32[1024]{0}) tuple(%i, %y)
}"""
CONDITION = """\
%condition (state.1: (s32[], f32[1024])) -> pred[] {
  %state.1 = (s32[], f32[1024]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %n = s32[] constant(12)
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}"""


def loop(trips: str = ', backend_config={"known_trip_count":{"n":"12"}}') -> str:
    """Twelve negations of 1,024 numbers."""
    return program(
        f"""\
  %x = f32[1024]{{0}} parameter(0)
  %zero = s32[] constant(0)
  %first = (s32[], f32[1024]{{0}}) tuple(%zero, %x)
  %all = (s32[], f32[1024]{{0}}) while(%first), condition=%condition, body=%body{trips}
  ROOT %out = f32[1024]{{0}} get-tuple-element(%all), index=1""",
        BODY,
        CONDITION,
    )

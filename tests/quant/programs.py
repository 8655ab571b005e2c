"""Small optimized programs in XLA's format for GPUs, shortened."""

TABLES = """\
FileNames
1 "/home/user/train.py"
2 "/venv/lib/python3.11/site-packages/flax/nnx/nn/linear.py"

FunctionNames
1 "step"
2 "__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=17 end_line=17 column=4 end_column=30}
2 {file_name_id=2 function_name_id=2 line=400 end_line=401 column=8 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""

METADATA = 'metadata={op_name="jit(step)/dot_general" stack_frame_id=2}'
DIMENSIONS = "lhs_contracting_dims={1}, rhs_contracting_dims={1}"
BACKEND = (
    'backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}'
)


def gemm(body: str, lhs: str, rhs: str, types: tuple[str, str], *, target: str) -> str:
    """Make a cuBLASLt call on `%lhs` and `%rhs`, which `body` computes."""
    left, right = types
    return f"""\
HloModule jit_step, is_scheduled=true

{TABLES}
ENTRY %main.1 (a.1: {left}[32,64], b.1: {right}[16,64], s.1: f32[], r.1: f32[32]) -> bf16[32,16] {{
  %s = f32[] parameter(2)
  %r = f32[32]{{0}} parameter(3)
  %b = {right}[16,64]{{1,0}} parameter(1), sharding={{replicated}}
  %a = {left}[32,64]{{1,0}} parameter(0), metadata={{op_name="a (the left)"}}
{body}
  %gemm.1 = (bf16[32,16]{{1,0}}, s8[4194304]{{0}}) custom-call(%{lhs}, %{rhs}), \
custom_call_target="{target}", {METADATA}, {BACKEND}
  ROOT %out = bf16[32,16]{{1,0}} get-tuple-element(%gemm.1), index=0
}}
"""


def direct(left: str = "f8e4m3fn", right: str = "f8e4m3fn") -> str:
    """Make a program with an FP8 kernel."""
    return gemm("", "a", "b", (left, right), target="__cublas$lt$matmul$f8")


WIDEN = """\
  %x = bf16[32,64]{1,0} convert(%a)
  %y = bf16[16,64]{1,0} convert(%b)"""
CAST_AFTER_SCALE = """\
  %wide = f32[32,64]{1,0} convert(%a)
  %scale = f32[32,64]{1,0} broadcast(%s), dimensions={}
  %scaled = f32[32,64]{1,0} multiply(%wide, %scale)
  %x = bf16[32,64]{1,0} convert(%scaled)
  %y = bf16[16,64]{1,0} convert(%b)"""
ROWS = """\
  %wide = bf16[32,64]{1,0} convert(%a)
  %narrow = bf16[32]{0} convert(%r)
  %scale = bf16[32,64]{1,0} broadcast(%narrow), dimensions={0}
  %x = bf16[32,64]{1,0} multiply(%scale, %wide)
  %y = bf16[16,64]{1,0} convert(%b)"""


def widened(left: str, right: str, body: str = WIDEN) -> str:
    """Make a bfloat16 matmul of operands that are converted from `left` and `right`."""
    return gemm(body, "x", "y", (left, right), target="__cublas$lt$matmul")


def fused(
    left: str, right: str, *, operand: str, wide: str = "w", kind: str = "__triton_gemm"
) -> str:
    """Make a matmul in a fusion: of FP8 (operand "d"), or of what another fusion widened ("l").

    That fusion has one result (wide "w") or two ("first").
    """
    return f"""\
HloModule jit_step, is_scheduled=true

%wrapped_convert (p: {left}[32,64]) -> bf16[32,64] {{
  %p = {left}[32,64]{{1,0}} parameter(0)
  ROOT %c = bf16[32,64]{{1,0}} convert(%p)
}}

%two (p.1: {left}[32,64]) -> (bf16[32,64], {left}[32,64]) {{
  %p.1 = {left}[32,64]{{1,0}} parameter(0)
  %c.1 = bf16[32,64]{{1,0}} convert(%p.1)
  ROOT %t = (bf16[32,64]{{1,0}}, {left}[32,64]{{1,0}}) tuple(%c.1, %p.1)
}}

%gemm_computation (l: bf16[32,64], d: {left}[32,64], q: {right}[16,64]) -> bf16[32,16] {{
  %l = bf16[32,64]{{1,0}} parameter(0)
  %d = {left}[32,64]{{1,0}} parameter(1)
  %q = {right}[16,64]{{1,0}} parameter(2)
  ROOT %dot.1 = bf16[32,16]{{1,0}} dot(%{operand}, %q), {DIMENSIONS}, {METADATA}
}}

ENTRY %main.1 (a.1: {left}[32,64], b.1: {right}[16,64]) -> bf16[32,16] {{
  %b = {right}[16,64]{{1,0}} parameter(1)
  %a = {left}[32,64]{{1,0}} parameter(0)
  %w = bf16[32,64]{{1,0}} fusion(%a), kind=kLoop, calls=%wrapped_convert
  %pair = (bf16[32,64]{{1,0}}, {left}[32,64]{{1,0}}) fusion(%a), kind=kLoop, calls=%two
  %first = bf16[32,64]{{1,0}} get-tuple-element(%pair), index=0
  %second = {left}[32,64]{{1,0}} get-tuple-element(%pair), index=1
  ROOT %out = bf16[32,16]{{1,0}} fusion(%{wide}, %second, %b), kind=kCustom, \
calls=%gemm_computation, backend_config={{"fusion_backend_config":{{"kind":"{kind}"}}}}
}}
"""


# The maximum of |x| in two steps, a softmax's maximum of x, a cast and a transposed copy.
STATISTICS = """\
%max (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %greater = f32[] maximum(%x, %y)
}

%fused_amax (p: f32[32,64]) -> f32[32] {
  %p = f32[32,64]{1,0} parameter(0)
  %abs.1 = f32[32,64]{1,0} abs(%p)
  %flat = f32[32,64]{1,0} bitcast(%abs.1)
  %low = f32[] constant(-inf)
  ROOT %first = f32[32]{0} reduce(%flat, %low), dimensions={1}, to_apply=%max
}

ENTRY %main.1 (a.1: f32[32,64]) -> (f32[], f32[32], f8e4m3fn[64,32]) {
  %a = f32[32,64]{1,0} parameter(0)
  %low = f32[] constant(-inf)
  %partial = f32[32]{0} fusion(%a), kind=kInput, calls=%fused_amax
  %second = f32[] reduce(%partial, %low), dimensions={0}, to_apply=%max
  %softmax = f32[32]{0} reduce(%a, %low), dimensions={1}, to_apply=%max
  %cast = f8e4m3fn[32,64]{1,0} convert(%a)
  %other = f8e5m2[32,64]{1,0} convert(%cast)
  %turned = f8e4m3fn[64,32]{1,0} transpose(%cast), dimensions={1,0}
  ROOT %out = (f32[], f32[32]{0}, f8e4m3fn[64,32]{1,0}) tuple(%second, %softmax, %turned)
}
"""

LOOP = f"""\
%body (state: (s32[], f8e4m3fn[32,64], f8e4m3fn[16,64])) -> \
(s32[], f8e4m3fn[32,64], f8e4m3fn[16,64]) {{
  %state = (s32[], f8e4m3fn[32,64]{{1,0}}, /*index=2*/f8e4m3fn[16,64]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %a = f8e4m3fn[32,64]{{1,0}} get-tuple-element(%state), index=1
  %b = f8e4m3fn[16,64]{{1,0}} get-tuple-element(%state), index=2
  %gemm.1 = (bf16[32,16]{{1,0}}, s8[4194304]{{0}}) custom-call(%a, %b), \
custom_call_target="__cublas$lt$matmul$f8", {METADATA}, {BACKEND}
  ROOT %next = (s32[], f8e4m3fn[32,64]{{1,0}}, f8e4m3fn[16,64]{{1,0}}) tuple(%i, %a, %b)
}}

%condition (state.1: (s32[], f8e4m3fn[32,64], f8e4m3fn[16,64])) -> pred[] {{
  %state.1 = (s32[], f8e4m3fn[32,64]{{1,0}}, f8e4m3fn[16,64]{{1,0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %n = s32[] constant(12)
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}}

ENTRY %main.1 (s.1: (s32[], f8e4m3fn[32,64], f8e4m3fn[16,64])) -> \
(s32[], f8e4m3fn[32,64], f8e4m3fn[16,64]) {{
  %s = (s32[], f8e4m3fn[32,64]{{1,0}}, f8e4m3fn[16,64]{{1,0}}) parameter(0)
  ROOT %loop = (s32[], f8e4m3fn[32,64]{{1,0}}, f8e4m3fn[16,64]{{1,0}}) while(%s), \
condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"12"}}}}
}}
"""

ASYNCHRONOUS = """\
%sliced (p: f32[8,4], i: s32[]) -> f32[1,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,4]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,4}
}

ENTRY %main (x: f32[8,4], n: s32[]) -> f32[1,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %begun = ((f32[8,4]{1,0}, s32[]), f32[1,4]{1,0}, u32[]) fusion-start(%x, %n), calls=%sliced
  %done = f32[1,4]{1,0} fusion-done(%begun)
  ROOT %out = f32[1,4]{1,0} negate(%done)
}
"""

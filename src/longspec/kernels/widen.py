"""Conversion of 8-bit weights to the numbers that are multiplied.

Each byte of a matrix is converted once, so conversions take as long as reading the bytes, or longer: the
instructions that convert int8 to fp32, and fp16 to bf16, run at a quarter of the speed of others or less. So
int8 is put into the bits of a larger number with a fixed exponent, from which a constant is subtracted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from longspec.kernels.tiling import is_hopper


def convert(device: torch.device) -> int:
    """The CONVERT of `widen` for this device."""
    return 1 if is_hopper(device) else 0


@triton.jit
def widen(weights, dtype: tl.constexpr, CONVERT: tl.constexpr) -> tl.tensor:
    """int8 or fp8 (e4m3) as bf16, fp16 or fp32, exactly. CONVERT 0 is what the compiler makes of it, 1 is by
    Hopper's instructions; a thread then has pairs of weights for a half type and fours for fp32."""
    if weights.dtype != tl.int8 and (CONVERT == 0 or dtype != tl.bfloat16):
        # To bf16 through fp32: there is a fast instruction for each of the two steps.
        result = weights.to(tl.float32).to(dtype) if dtype == tl.bfloat16 else weights.to(dtype)
    elif CONVERT == 0:
        # To fp32 in two steps: in one, bytes are unpacked before the turn and fill all registers.
        result = weights.to(tl.float16).to(dtype) if dtype == tl.float32 else weights.to(dtype)
    elif weights.dtype != tl.int8:
        result = _fp8_to_bf16(weights)
    elif dtype == tl.float32:
        result = _int8_to_fp32(weights)
    elif dtype == tl.float16:
        result = _int8_to_fp16(weights)
    else:
        result = _int8_to_bf16(weights)
    return result


@triton.jit
def _int8_to_fp32(weights) -> tl.tensor:
    """2 ** 23 + (w + 128), less 2 ** 23 + 128."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 u;
        xor.b32 u, $4, 0x80808080;
        prmt.b32 $0, u, 0x4B000000, 0x7440;
        prmt.b32 $1, u, 0x4B000000, 0x7441;
        prmt.b32 $2, u, 0x4B000000, 0x7442;
        prmt.b32 $3, u, 0x4B000000, 0x7443;
        add.f32 $0, $0, 0fCB000080;
        add.f32 $1, $1, 0fCB000080;
        add.f32 $2, $2, 0fCB000080;
        add.f32 $3, $3, 0fCB000080;
        }""",
        "=f,=f,=f,=f,r", [weights], dtype=tl.float32, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def _int8_to_fp16(weights) -> tl.tensor:
    """1024 + (w + 128), less 1024 + 128."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 u, c;
        xor.b32 u, $1, 0x80808080;
        mov.b32 c, 0x64806480;
        prmt.b32 u, u, 0x64646464, 0x4140;
        sub.f16x2 $0, u, c;
        }""",
        "=r,r", [weights], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _int8_to_bf16(weights) -> tl.tensor:
    """128 + the lower 7 bits, less 128 or, with the sign bit, 256."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, m;
        prmt.b32 a, $1, 0x43434343, 0x4140;
        and.b32 m, a, 0xFF7FFF7F;
        lop3.b32 a, a, m, 0xC300C300, 0xBE;
        add.rn.bf16x2 $0, a, m;
        }""",
        "=r,r", [weights], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _fp8_to_bf16(weights) -> tl.tensor:
    """Sign, exponent and mantissa at their places in bf16, times 2 ** (127 - 7). Adding 0x7800 moves the sign
    from bit 11 to bit 15."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, c;
        mov.b32 c, 0x7B807B80;
        prmt.b32 a, $1, 0, 0x4140;
        mad.lo.u32 a, a, 16, 0x78007800;
        and.b32 a, a, 0x87F087F0;
        mul.rn.bf16x2 $0, a, c;
        }""",
        "=r,r", [weights], dtype=tl.bfloat16, is_pure=True, pack=2,
    )  # fmt: skip

"""Loads stored weights as fp32, and stores fp32 weights with one rounding.

The formulas are those of docs/design/optim.md and of csrc/kernels/update_kernels.h, to the
last bit. bfloat16 is rounded by integers: the interpreter's own conversion truncates, a GPU's has
another NaN, and a memory-bound kernel has the instructions to spare.
"""

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
NAN_BITS = tl.constexpr(0x7FC00000)

# Numbers that vary from call to call must not cause recompilation, not even the value 1.
VARYING = ("lead", "num_elems", "num_rows", "num_tokens", "key", "first_elem", "padding_idx")


# ---- random bits


@triton.jit
def mix(x):
    """A permutation of the 32-bit numbers in which each bit depends on all."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_bits(key, elem):
    """16 bits of the element of a 64-bit number, by the seed's key."""
    low = elem.to(tl.uint32) ^ key.to(tl.uint32)
    return mix(mix(low) + (elem >> 32).to(tl.uint32)) >> 16


# ---- the numbers of an update


@triton.jit
def multiply_add(a, b, c):
    """a * b + c rounded once."""
    if IS_INTERPRETED:  # whose fma rounds twice; the product of two fp32 is exact in fp64
        total = (a.to(tl.float64) * b + c).to(tl.float32)
    else:
        total = tl.fma(a, b, c)
    return total


@triton.jit
def used_gradient(grad, scale, clip_value):
    """The gradient times a factor, then within +-clip_value; NaN stays."""
    grad = grad.to(tl.float32) * scale
    grad = tl.where(grad > clip_value, clip_value, grad)
    return tl.where(grad < -clip_value, -clip_value, grad)


# ---- memory


# `low` is the address of what bfloat16 weights miss of the bits of fp32, or None.


@triton.jit
def load_weight(weight, low, at, mask):
    """The weights at some places, in fp32; masked-out elements are undefined."""
    high = tl.load(weight + at, mask=mask)
    if low is None:
        value = high.to(tl.float32)
    else:
        bits = high.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        rest = tl.load(low + at, mask=mask).to(tl.int32).to(tl.uint32, bitcast=True)
        value = (bits + rest).to(tl.float32, bitcast=True)
    return value


@triton.jit
def store_weight(weight, low, at, value, key, elem, mask, IS_STOCHASTIC: tl.constexpr):
    """Rounds once: split if there is `low`, else by the element's random bits or to nearest."""
    if weight.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        bits = tl.where(value == value, bits, NAN_BITS).to(tl.uint32)
        if low is not None:
            rounded = bits + 0x8000
        elif IS_STOCHASTIC:
            rounded = bits + random_bits(key, elem)
        else:
            rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        high = (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
        tl.store(weight + at, high, mask=mask)
        if low is not None:
            # The lower half of bits - (high << 16), whose lower half is that of bits.
            tl.store(low + at, bits.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    else:
        tl.store(weight + at, value.to(weight.dtype.element_ty), mask=mask)

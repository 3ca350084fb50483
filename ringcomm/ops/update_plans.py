"""The tiles and warps of the Triton kernels that update weights.

Nothing here has run on a GPU: the numbers follow from registers and shared memory as
tests/python/update_variants.py tells of them.
"""

import functools
from typing import NamedTuple

import torch

# One vector of 16-bit elements a thread: 32 to 40 registers, so that an SM has 2048 threads with
# 64 KB on their way, where 23 KB keep its memory busy (see triton_plans.py).
SGD_BLOCK, SGD_WARPS = 2048, 8
# A row of an embedding goes to few warps, since most rows are of one token or two.
EMBEDDING_BLOCK, EMBEDDING_WARPS, EMBEDDING_UNROLL = 1024, 4, 4
# Two vectors a thread; the sums of a tile's columns are 1/16 of its bytes, those of rows 1/32.
MATRIX_ROWS, MATRIX_COLS, MATRIX_WARPS = 32, 128, 8


class Machine(NamedTuple):
    """What plans depend on. Descriptors are TMA's, with the 227 KiB of Hopper and Blackwell."""

    has_descriptors: bool
    num_sms: int


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """Of a CUDA device; nothing waits for it."""
    found = torch.cuda.get_device_properties(device)
    return Machine(found.major in (9, 10), found.multi_processor_count)


class LinearPlan(NamedTuple):
    """A tile of the gradient, tokens at a time, and who works on it."""

    block_out: int
    block_in: int
    block_tokens: int
    num_warps: int
    num_stages: int


# The largest first. 128 x 256 is what 8 warps have registers for, and 4 stages take 197 KB.
DESCRIBED = (
    LinearPlan(128, 256, 64, 8, 4),
    LinearPlan(128, 128, 64, 8, 4),
    LinearPlan(64, 64, 64, 4, 4),
)
# 64 KB of shared memory, so that GPUs with 99 have room.
ADDRESSED = (LinearPlan(128, 128, 32, 8, 4), LinearPlan(64, 64, 32, 4, 4))
# Of fp32, multiplied without tensor cores.
ADDRESSED_FP32 = (LinearPlan(128, 128, 16, 8, 3), LinearPlan(64, 64, 16, 8, 3))


def num_tiles(num_rows: int, num_cols: int, block_rows: int, block_cols: int) -> int:
    """Tiles of a matrix, those at its edges included."""
    return -(-num_rows // block_rows) * -(-num_cols // block_cols)


def linear_plan(
    num_out: int, num_in: int, element_bytes: int, machine: Machine, is_described: bool
) -> LinearPlan:
    """The largest tile of which three quarters of the SMs have one; else the smallest."""
    plans = DESCRIBED if is_described else ADDRESSED
    if element_bytes == 4:
        plans = ADDRESSED_FP32
    for plan in plans[:-1]:
        if 4 * num_tiles(num_out, num_in, plan.block_out, plan.block_in) >= 3 * machine.num_sms:
            return plan
    return plans[-1]

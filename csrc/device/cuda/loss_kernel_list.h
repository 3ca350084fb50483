#pragma once

#include "device/cuda/loss_rows.h"
#include "device/cuda/loss_sums.h"
#include "device/cuda/shard_loss_rows.h"

/// X(name, body): every kernel of losses; `body` takes a RowBlock and a LossCall. Those of rows
/// are launched in clusters, the sum as one block.
#define RINGCOMM_LOSS_KERNELS(X)                                           \
  X(ringcomm_loss_rows_bfloat16, (loss_rows<BFloat16Logits, false>))       \
  X(ringcomm_loss_rows_float32, (loss_rows<FloatLogits, false>))           \
  X(ringcomm_smooth_loss_rows_bfloat16, (loss_rows<BFloat16Logits, true>)) \
  X(ringcomm_smooth_loss_rows_float32, (loss_rows<FloatLogits, true>))     \
  X(ringcomm_sum_losses, (sum_losses))

/// The same of kernels whose `body` takes a RowBlock, a Block that waits for peers, and a
/// ShardLossCall.
#define RINGCOMM_SHARD_LOSS_KERNELS(X)                                                 \
  X(ringcomm_shard_loss_rows_bfloat16, (shard_loss_rows<BFloat16Logits, false>))       \
  X(ringcomm_shard_loss_rows_float32, (shard_loss_rows<FloatLogits, false>))           \
  X(ringcomm_smooth_shard_loss_rows_bfloat16, (shard_loss_rows<BFloat16Logits, true>)) \
  X(ringcomm_smooth_shard_loss_rows_float32, (shard_loss_rows<FloatLogits, true>))

#pragma once

#include "cuda/kernels/loss_rows.h"
#include "cuda/kernels/loss_sums.h"

/// X(name, body): every kernel of losses; `body` takes a RowBlock and a LossCall. Those of rows
/// are launched in clusters, the sum as one block.
#define RINGCOMM_LOSS_KERNELS(X)                                           \
  X(ringcomm_loss_rows_bfloat16, (loss_rows<BFloat16Logits, false>))       \
  X(ringcomm_loss_rows_float32, (loss_rows<FloatLogits, false>))           \
  X(ringcomm_smooth_loss_rows_bfloat16, (loss_rows<BFloat16Logits, true>)) \
  X(ringcomm_smooth_loss_rows_float32, (loss_rows<FloatLogits, true>))     \
  X(ringcomm_sum_losses, (sum_losses))

#pragma once

#include "device/cuda/mail.h"
#include "device/cuda/move.h"
#include "device/cuda/one_shot.h"
#include "device/cuda/reduce_gather.h"
#include "device/cuda/ring.h"
#include "device/cuda/update.h"

// All the kernels there are: the host asks an image for their names (collectives/cuda/kernels.h), a
// file of each kind of machine makes them of their bodies.

/// X(name, Call, body): `body` takes a block and a Call. Of what reduces elements of a type:
#define RINGCOMM_REDUCING_KERNELS(X, suffix, Element)                                          \
  X(ringcomm_one_shot_##suffix, KernelCall, (all_reduce_one_shot<Element>))                    \
  X(ringcomm_two_shot_##suffix, KernelCall, (reduce_gather<Element, ReduceShape::kAllReduce>)) \
  X(ringcomm_reduce_scatter_##suffix, KernelCall,                                              \
    (reduce_gather<Element, ReduceShape::kReduceScatter>))                                     \
  X(ringcomm_reduce_##suffix, KernelCall, (reduce_gather<Element, ReduceShape::kReduce>))      \
  X(ringcomm_ring_##suffix, KernelCall, (all_reduce_ring<Element>))

#define RINGCOMM_FLOAT_KERNELS(X)                            \
  RINGCOMM_REDUCING_KERNELS(X, float16, Float16Element)      \
  RINGCOMM_REDUCING_KERNELS(X, bfloat16, BFloat16Element)    \
  RINGCOMM_REDUCING_KERNELS(X, float32, FloatElement<float>) \
  RINGCOMM_REDUCING_KERNELS(X, float64, FloatElement<double>)

#define RINGCOMM_SIGNED_KERNELS(X)                              \
  RINGCOMM_REDUCING_KERNELS(X, int8, IntElement<std::int8_t>)   \
  RINGCOMM_REDUCING_KERNELS(X, int16, IntElement<std::int16_t>) \
  RINGCOMM_REDUCING_KERNELS(X, int32, IntElement<std::int32_t>) \
  RINGCOMM_REDUCING_KERNELS(X, int64, IntElement<std::int64_t>)

#define RINGCOMM_UNSIGNED_KERNELS(X)                              \
  RINGCOMM_REDUCING_KERNELS(X, bool, BoolElement)                 \
  RINGCOMM_REDUCING_KERNELS(X, uint8, IntElement<std::uint8_t>)   \
  RINGCOMM_REDUCING_KERNELS(X, uint16, IntElement<std::uint16_t>) \
  RINGCOMM_REDUCING_KERNELS(X, uint32, IntElement<std::uint32_t>) \
  RINGCOMM_REDUCING_KERNELS(X, uint64, IntElement<std::uint64_t>)

/// Of each optimizer's step: gradients of a type, parameters of another.
#define RINGCOMM_UPDATE_KERNEL(X, optimizer, Step, grad, Grad, param, Param) \
  X(ringcomm_update_##optimizer##_##grad##_##param, KernelCall,              \
    (reduce_update_gather<Step, Grad, Param>))
#define RINGCOMM_UPDATES_OF_GRAD(X, optimizer, Step, grad, Grad)                    \
  RINGCOMM_UPDATE_KERNEL(X, optimizer, Step, grad, Grad, float16, Float16Element)   \
  RINGCOMM_UPDATE_KERNEL(X, optimizer, Step, grad, Grad, bfloat16, BFloat16Element) \
  RINGCOMM_UPDATE_KERNEL(X, optimizer, Step, grad, Grad, float32, FloatElement<float>)
#define RINGCOMM_UPDATES(X, optimizer, Step)                              \
  RINGCOMM_UPDATES_OF_GRAD(X, optimizer, Step, float16, Float16Element)   \
  RINGCOMM_UPDATES_OF_GRAD(X, optimizer, Step, bfloat16, BFloat16Element) \
  RINGCOMM_UPDATES_OF_GRAD(X, optimizer, Step, float32, FloatElement<float>)
#define RINGCOMM_UPDATE_KERNELS(X)  \
  RINGCOMM_UPDATES(X, sgd, SgdStep) \
  RINGCOMM_UPDATES(X, adamw, AdamWStep) RINGCOMM_UPDATES(X, lomo, LomoStep)

/// Of records there are no packets, which have eight bytes.
#define RINGCOMM_OTHER_KERNELS(X)                             \
  X(ringcomm_two_shot_softmax_stats, KernelCall,              \
    (reduce_gather<SoftmaxElement, ReduceShape::kAllReduce>)) \
  X(ringcomm_move_same, KernelCall, (move<true>))             \
  X(ringcomm_move, KernelCall, (move<false>))                 \
  X(ringcomm_exchange, MailCall, (exchange_mail))

#define RINGCOMM_ALL_KERNELS(X) \
  RINGCOMM_FLOAT_KERNELS(X)     \
  RINGCOMM_SIGNED_KERNELS(X)    \
  RINGCOMM_UNSIGNED_KERNELS(X) RINGCOMM_UPDATE_KERNELS(X) RINGCOMM_OTHER_KERNELS(X)

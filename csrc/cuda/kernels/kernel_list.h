#pragma once

#include "cuda/kernels/move.h"
#include "cuda/kernels/one_shot.h"
#include "cuda/kernels/reduce_gather.h"
#include "cuda/kernels/send_recv.h"
#include "cuda/kernels/update.h"

/// All kernels: X(name, Call, body), where `body` takes a block and a Call. The host looks their
/// names up (cuda/collectives/kernels.h); one file per kind of machine instantiates their bodies.
#define RINGCOMM_REDUCING_KERNELS(X, suffix, Reducer)                                          \
  X(ringcomm_one_shot_##suffix, KernelCall, (all_reduce_one_shot<Reducer>))                    \
  X(ringcomm_two_shot_##suffix, KernelCall, (reduce_gather<Reducer, ReduceShape::kAllReduce>)) \
  X(ringcomm_reduce_scatter_##suffix, KernelCall,                                              \
    (reduce_gather<Reducer, ReduceShape::kReduceScatter>))                                     \
  X(ringcomm_reduce_##suffix, KernelCall, (reduce_gather<Reducer, ReduceShape::kReduce>))

/// float64, integers and booleans share one kernel of each: "any"; large ones are rare.
#define RINGCOMM_REDUCTION_KERNELS(X)                                   \
  RINGCOMM_REDUCING_KERNELS(X, float16, TypedReducer<Float16Element>)   \
  RINGCOMM_REDUCING_KERNELS(X, bfloat16, TypedReducer<BFloat16Element>) \
  RINGCOMM_REDUCING_KERNELS(X, float32, TypedReducer<Float32Element>)   \
  RINGCOMM_REDUCING_KERNELS(X, any, AnyReducer)

/// For each optimizer's step: the gradients' type and the parameters' type.
#define RINGCOMM_UPDATE_KERNEL(X, optimizer, Step, grad, Grad, param, Param) \
  X(ringcomm_update_##optimizer##_##grad##_##param, KernelCall,              \
    (reduce_update_gather<Step, Grad, Param>))
#define RINGCOMM_UPDATES_OF_GRAD(X, optimizer, Step, grad, Grad)                    \
  RINGCOMM_UPDATE_KERNEL(X, optimizer, Step, grad, Grad, float16, Float16Element)   \
  RINGCOMM_UPDATE_KERNEL(X, optimizer, Step, grad, Grad, bfloat16, BFloat16Element) \
  RINGCOMM_UPDATE_KERNEL(X, optimizer, Step, grad, Grad, float32, Float32Element)
#define RINGCOMM_UPDATES(X, optimizer, Step)                              \
  RINGCOMM_UPDATES_OF_GRAD(X, optimizer, Step, float16, Float16Element)   \
  RINGCOMM_UPDATES_OF_GRAD(X, optimizer, Step, bfloat16, BFloat16Element) \
  RINGCOMM_UPDATES_OF_GRAD(X, optimizer, Step, float32, Float32Element)
#define RINGCOMM_UPDATE_KERNELS(X)  \
  RINGCOMM_UPDATES(X, sgd, SgdStep) \
  RINGCOMM_UPDATES(X, adamw, AdamWStep) RINGCOMM_UPDATES(X, lomo, LomoStep)

#define RINGCOMM_OTHER_KERNELS(X)                    \
  X(ringcomm_move_same, KernelCall, (move<true>))    \
  X(ringcomm_move, KernelCall, (move<false>))        \
  X(ringcomm_exchange, P2pCall, (exchange_messages)) \
  X(ringcomm_where, KernelCall, (where))

#define RINGCOMM_ALL_KERNELS(X) \
  RINGCOMM_REDUCTION_KERNELS(X) \
  RINGCOMM_UPDATE_KERNELS(X) RINGCOMM_OTHER_KERNELS(X)

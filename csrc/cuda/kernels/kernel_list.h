#pragma once

#include "cuda/kernels/messages.h"
#include "cuda/kernels/packets.h"
#include "cuda/kernels/plain.h"
#include "cuda/kernels/ring.h"
#include "cuda/kernels/update.h"

/// All kernels: X(name, Call, body), where `body` takes a block and a Call. The host looks their
/// names up (cuda/collectives/kernels.h); one file per kind of machine instantiates their bodies.
/// Those that wait for peers are apart from those that do not.
#define RINGCOMM_WAITING_REDUCTIONS(X, suffix, Reducer)                                         \
  X(ringcomm_one_shot_##suffix, KernelCall, (send_packets<PacketShape::kOneRound, Reducer>))    \
  X(ringcomm_two_rounds_##suffix, KernelCall, (send_packets<PacketShape::kTwoRounds, Reducer>)) \
  X(ringcomm_reduce_packets_##suffix, KernelCall, (send_packets<PacketShape::kOwner, Reducer>)) \
  X(ringcomm_ring_##suffix, KernelCall, (all_reduce_ring<Reducer>))

#define RINGCOMM_WAITING_KERNELS(X)                                                    \
  RINGCOMM_WAITING_REDUCTIONS(X, float16, TypedReducer<Float16Element>)                \
  RINGCOMM_WAITING_REDUCTIONS(X, bfloat16, TypedReducer<BFloat16Element>)              \
  RINGCOMM_WAITING_REDUCTIONS(X, float32, TypedReducer<Float32Element>)                \
  RINGCOMM_WAITING_REDUCTIONS(X, any, AnyReducer)                                      \
  X(ringcomm_move_packets, KernelCall, (send_packets<PacketShape::kMove, AnyReducer>)) \
  X(ringcomm_open, KernelCall, (open_call))                                            \
  X(ringcomm_close, KernelCall, (close_call))                                          \
  X(ringcomm_open_messages, P2pCall, (open_messages))                                  \
  X(ringcomm_close_messages, P2pCall, (close_messages))

/// float64, integers and booleans share one kernel of each: "any"; large ones are rare.
#define RINGCOMM_PLAIN_KERNELS(X)                                                           \
  X(ringcomm_reduce_float16, KernelCall, (reduce_in_place<TypedReducer<Float16Element>>))   \
  X(ringcomm_reduce_bfloat16, KernelCall, (reduce_in_place<TypedReducer<BFloat16Element>>)) \
  X(ringcomm_reduce_float32, KernelCall, (reduce_in_place<TypedReducer<Float32Element>>))   \
  X(ringcomm_reduce_any, KernelCall, (reduce_in_place<AnyReducer>))                         \
  X(ringcomm_move, KernelCall, (move_in_place))                                             \
  X(ringcomm_copy_in, KernelCall, (copy_in))                                                \
  X(ringcomm_copy_out, KernelCall, (copy_out))                                              \
  X(ringcomm_copy_messages, P2pCall, (copy_messages))

/// For each optimizer's step: the gradients' type and the parameters' type.
#define RINGCOMM_UPDATE_KERNEL(X, optimizer, Step, grad, Grad, param, Param) \
  X(ringcomm_update_##optimizer##_##grad##_##param, KernelCall,              \
    (update_in_place<Step, Grad, Param>))
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

#define RINGCOMM_ALL_KERNELS(X) \
  RINGCOMM_WAITING_KERNELS(X)   \
  RINGCOMM_PLAIN_KERNELS(X) RINGCOMM_UPDATE_KERNELS(X)

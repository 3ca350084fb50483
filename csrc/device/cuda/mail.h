#pragma once

#include "core/chunk_layout.h"
#include "core/link_protocol.h"
#include "device/cuda/memory.h"
#include "device/cuda/phases.h"

// Sends and receives: slices of a message through the links of a pair of ranks, which lie in the
// receiver's staging memory. Block b is channel b. Messages of a pair arrive in the order in which
// they were sent; each slice says of which message it is.

namespace ringcomm::cuda {

struct alignas(16) MailHeading {
  std::uint64_t num_bytes;  ///< of the whole message
  std::int64_t tag;
};

/// The slices of a block's part of a message. An empty one has a slice in channel 0.
struct MailSlices {
  std::size_t slice_bytes;
  std::size_t num;
  RINGCOMM_HD MailSlices(const KernelCall& call, std::uint64_t num_bytes)
      : slice_bytes(call.staging.layout.mail_slot_bytes - sizeof(MailHeading)),
        num(num_bytes == 0 ? 1 : num_slices(num_bytes, slice_bytes)) {}
};

template <Block B>
RINGCOMM_HD Stop send_slices(B& block, const KernelCall& call) {
  SpinBudget budget;
  SendLink<B> link(block, budget, call.staging.mail_link(call.rank, call.root, block.block_idx()),
                   call.root);
  const std::uint64_t num_bytes = call.input_bytes[0];
  const MailSlices slices(call, num_bytes);
  for (std::size_t i = block.block_idx(); i < slices.num; i += block.num_blocks()) {
    std::byte* slot = nullptr;
    if (const Stop stop = link.acquire(slot); stop != Stop::kNone) return stop;
    if (block.thread_idx() == 0)
      *reinterpret_cast<MailHeading*>(slot) = {num_bytes, static_cast<std::int64_t>(call.tag)};
    const ElemRange bytes = slice_of({0, num_bytes}, i, slices.slice_bytes);
    block.copy(slot + sizeof(MailHeading), call.inputs[0] + bytes.begin_elems, bytes.num_elems);
    link.publish();
  }
  return Stop::kNone;
}

template <Block B>
RINGCOMM_HD Stop recv_slices(B& block, const KernelCall& call) {
  SpinBudget budget;
  RecvLink<B> link(block, budget, call.staging.mail_link(call.root, call.rank, block.block_idx()),
                   call.root);
  const std::uint64_t num_bytes = call.output_bytes[0];
  const MailSlices slices(call, num_bytes);
  for (std::size_t i = block.block_idx(); i < slices.num; i += block.num_blocks()) {
    const std::byte* slot = nullptr;
    if (const Stop stop = link.wait(slot); stop != Stop::kNone) return stop;
    const MailHeading theirs = *reinterpret_cast<const MailHeading*>(slot);
    if (theirs.num_bytes != num_bytes || theirs.tag != call.tag) {
      const std::uint32_t words[kHeaderWords] = {static_cast<std::uint32_t>(theirs.num_bytes),
                                                 static_cast<std::uint32_t>(theirs.num_bytes >> 32),
                                                 static_cast<std::uint32_t>(theirs.tag)};
      tell(block, call, kMailDiffers, call.root, words);
      return Stop::kAborted;
    }
    const ElemRange bytes = slice_of({0, num_bytes}, i, slices.slice_bytes);
    block.copy(call.outputs[0] + bytes.begin_elems, slot + sizeof(MailHeading), bytes.num_elems);
    link.release();
  }
  return Stop::kNone;
}

template <Block B>
RINGCOMM_HD void send_mail(B& block, const KernelCall& call) {
  finish(block, call, send_slices(block, call));
}
template <Block B>
RINGCOMM_HD void recv_mail(B& block, const KernelCall& call) {
  finish(block, call, recv_slices(block, call));
}

}  // namespace ringcomm::cuda

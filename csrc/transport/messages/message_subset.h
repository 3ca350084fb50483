#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "transport/messages/message_transport.h"

namespace ringcomm {

/// A subset of a transport's ranks as a group, numbered in the order of `ranks`; this rank is one
/// of them. `tag_shift` is added to all tags, so subsets that share a pair of ranks need no common
/// order. abort() ends the messages of the whole transport.
class MessageSubset final : public MessageTransport {
 public:
  /// `whole` must outlive this object.
  MessageSubset(MessageTransport& whole, std::vector<int> ranks, int tag_shift)
      : whole_(whole), ranks_(std::move(ranks)), tag_shift_(tag_shift) {}

  int rank() const override {
    return static_cast<int>(std::find(ranks_.begin(), ranks_.end(), whole_.rank()) -
                            ranks_.begin());
  }
  int world_size() const override { return static_cast<int>(ranks_.size()); }
  const std::string& name() const override { return whole_.name(); }

  MessagePtr isend(int peer, int tag, const std::byte* data, std::size_t num_bytes) override {
    return whole_.isend(whole_rank(peer), tag + tag_shift_, data, num_bytes);
  }
  MessagePtr irecv(int peer, int tag, std::byte* data, std::size_t num_bytes) override {
    // A message from a rank outside the subset cannot be distinguished from one inside.
    if (peer == kAnySource) throw Unsupported("a subset of a group cannot receive from any source");
    return whole_.irecv(whole_rank(peer), tag + tag_shift_, data, num_bytes);
  }
  int whole_rank(int peer) const override { return ranks_[static_cast<std::size_t>(peer)]; }
  /// The ranks of the whole transport, by their numbers here.
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  void end_messages() noexcept override { whole_.abort(); }

  MessageTransport& whole_;
  std::vector<int> ranks_;
  int tag_shift_;
};

}  // namespace ringcomm

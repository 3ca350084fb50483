#include "collectives/shm/p2p_mailbox.h"

#include <algorithm>
#include <cstring>

namespace ringcomm {

bool P2pMailbox::progress_sends() {
  std::byte* slot = nullptr;
  std::uint32_t num_moved = 0;
  for (; num_moved < num_slots_ && !sends_.empty() && to_.try_acquire(slot); ++num_moved) {
    P2pOp& op = *sends_.front();
    std::size_t room_bytes = slot_bytes_;
    if (!has_begun_sending_) {
      const MessageHeader header{.tag = op.tag, .num_bytes = op.num_bytes};
      std::memcpy(slot, &header, sizeof(header));
      slot += kHeaderBytes;
      room_bytes -= kHeaderBytes;
    }
    const std::size_t num_bytes = std::min(room_bytes, op.num_bytes - op.moved_bytes);
    arch_.copy(slot, op.data + op.moved_bytes, num_bytes);
    to_.publish();
    ring_();
    op.moved_bytes += num_bytes;
    has_begun_sending_ = op.moved_bytes < op.num_bytes;
    if (has_begun_sending_) continue;
    op.is_done = true;
    sends_.pop_front();
  }
  return num_moved > 0;
}

bool P2pMailbox::wants_more(const P2pReceives& receives) const {
  if (!arrivals_.empty() && !arrivals_.back().is_complete() && arrivals_.back().receive != nullptr)
    return true;
  return std::any_of(receives.begin(), receives.end(),
                     [&](const P2pOpPtr& op) { return op->peer == peer_ || op->peer < 0; });
}

bool P2pMailbox::progress_receives(P2pReceives& receives) {
  const std::byte* slot = nullptr;
  std::uint32_t num_moved = 0;
  for (; num_moved < num_slots_ && wants_more(receives) && from_.try_wait(slot); ++num_moved) {
    std::size_t available_bytes = slot_bytes_;
    if (arrivals_.empty() || arrivals_.back().is_complete()) {
      MessageHeader header;
      std::memcpy(&header, slot, sizeof(header));
      begin_arrival(header, receives);
      slot += kHeaderBytes;
      available_bytes -= kHeaderBytes;
    }
    Arrival& arrival = arrivals_.back();
    const std::size_t num_bytes =
        std::min<std::size_t>(available_bytes, arrival.header.num_bytes - arrival.moved_bytes);
    arch_.copy(arrival.data() + arrival.moved_bytes, slot, num_bytes);
    from_.release();
    ring_();
    arrival.moved_bytes += num_bytes;
    if (arrival.receive == nullptr || !arrival.is_complete()) continue;
    arrival.receive->is_done = true;
    arrivals_.pop_back();
  }
  return num_moved > 0;
}

void P2pMailbox::begin_arrival(const MessageHeader& header, P2pReceives& receives) {
  arrivals_.push_back({.header = header});
  const auto found = std::find_if(receives.begin(), receives.end(), [&](const P2pOpPtr& op) {
    return (op->peer == peer_ || op->peer < 0) && op->tag == header.tag;
  });
  if (found == receives.end()) {
    arrivals_.back().kept = std::make_unique_for_overwrite<std::byte[]>(header.num_bytes);
    return;
  }
  const P2pOpPtr op = *found;
  receives.erase(found);
  assign(arrivals_.back(), op);
}

bool P2pMailbox::match_kept(const P2pOpPtr& op) {
  const auto found = std::find_if(arrivals_.begin(), arrivals_.end(), [&](const Arrival& arrival) {
    return arrival.receive == nullptr && arrival.header.tag == op->tag;
  });
  if (found == arrivals_.end()) return false;
  assign(*found, op);
  if (found->is_complete()) {
    op->is_done = true;
    arrivals_.erase(found);
  }
  return true;
}

void P2pMailbox::assign(Arrival& arrival, const P2pOpPtr& op) const {
  op->peer = peer_;
  if (op->num_bytes != arrival.header.num_bytes) throw SizeMismatch{op, arrival.header.num_bytes};
  if (arrival.moved_bytes > 0) std::memcpy(op->data, arrival.kept.get(), arrival.moved_bytes);
  arrival.receive = op;
  arrival.kept = nullptr;
}

}  // namespace ringcomm

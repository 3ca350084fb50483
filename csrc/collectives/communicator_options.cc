#include "collectives/communicator_options.h"

#include <sstream>
#include <stdexcept>

namespace ringcomm {

std::string CommunicatorOptions::to_text() const {
  std::ostringstream text;
  text << "algorithm=" << name_of(algorithm)
       << " deterministic=" << (is_rank_ordered ? "rank_order" : "none")
       << " num_slots=" << num_slots << " slot_bytes=" << slot_bytes
       << " device_slot_bytes=" << device_slot_bytes << " one_shot_max_bytes=" << one_shot_max_bytes
       << " transport=" << (transport.empty() ? "auto" : transport);
  if (!p2p_backend.empty()) text << " p2p_backend=" << p2p_backend;
  return text.str();
}

void CommunicatorOptions::validate() const {
  if (num_slots < 2 || num_slots > 64)
    throw std::invalid_argument(
        "num_slots must be 2 to 64 (with one slot the ranks of a ring would deadlock), got " +
        std::to_string(num_slots));
  if (slot_bytes < 64 || slot_bytes > (std::size_t{64} << 20) || slot_bytes % 64 != 0)
    throw std::invalid_argument("slot_bytes must be a multiple of 64 from 64 to 67108864, got " +
                                std::to_string(slot_bytes));
  if (!transport.empty() && transport != "shm" && transport != "p2p")
    throw std::invalid_argument("transport must be shm or p2p, got '" + transport + "'");
}

CommunicatorOptions CommunicatorOptions::ring_options(const Collective& call) const {
  CommunicatorOptions asked = *this;
  if (call.ring_num_slots != 0) {
    asked.num_slots = call.ring_num_slots;
    asked.slot_bytes = num_slots * slot_bytes / call.ring_num_slots / 64 * 64;
  }
  if (call.ring_slot_bytes != 0) asked.slot_bytes = call.ring_slot_bytes;
  return asked;
}

void CommunicatorOptions::check_ring(const Collective& call) const {
  if (call.ring_num_slots == 0 && call.ring_slot_bytes == 0) return;
  const CommunicatorOptions asked = ring_options(call);
  asked.validate();
  if (asked.num_slots * asked.slot_bytes > num_slots * slot_bytes)
    throw std::invalid_argument(
        std::to_string(asked.num_slots) + " slots of " + std::to_string(asked.slot_bytes) +
        " bytes do not fit the group's links of " + std::to_string(num_slots * slot_bytes) +
        " bytes; make the group with a larger slot_bytes in ringcomm.Options");
}

}  // namespace ringcomm

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "collectives/collective.h"

namespace ringcomm {

/// The options of a group; must be equal on all its ranks.
struct CommunicatorOptions {
  Algorithm algorithm = Algorithm::kAuto;  ///< of all_reduce
  bool is_rank_ordered = false;            ///< reductions equal to the left-to-right sum over ranks
  std::uint32_t num_slots = 2;             ///< of ring links; 2 at least
  std::size_t slot_bytes = 256 << 10;      ///< of ring links
  /// The same, where tensors of a device go over messages.
  std::size_t device_slot_bytes = std::size_t{4} << 20;
  std::size_t one_shot_max_bytes = 0;  ///< where one_shot ends; 0: as was measured for us
  std::string transport = {};          ///< "shm", "p2p", or "": by where the ranks are
  std::string p2p_backend = {};        ///< what carries messages, where anything does
  /// Where this rank is; empty: found out. The one that may differ between ranks.
  std::string host_id = {};

  /// "algorithm=auto deterministic=none num_slots=2 slot_bytes=262144 ..."
  std::string to_text() const;
  /// Throws std::invalid_argument.
  void validate() const;

  /// The slots of a ring's links for `call`: from the call if it sets them, else from the group. If
  /// the call sets only the number of slots, they fill the links.
  CommunicatorOptions ring_options(const Collective& call) const;
  /// Throws std::invalid_argument if the slots that `call` requests do not fit the group's links.
  void check_ring(const Collective& call) const;
};

}  // namespace ringcomm

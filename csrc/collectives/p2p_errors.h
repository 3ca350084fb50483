#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "collectives/failure.h"
#include "collectives/p2p_op.h"

namespace ringcomm {

/// Error messages of sends and receives, for all carriers.

/// "recv from rank 2 (tag 6, 44 bytes)"
Activity activity_of(const P2pOp& op);
/// Throws std::invalid_argument unless the operation's peer is another rank of the group, or any.
void check_peer(const P2pOp& op, int rank, int world_size);
/// A message of `sent_bytes` matched a receive of another size on `rank`: ends the group.
[[noreturn]] void raise_misfit(Failure& failure, const P2pOp& receive, std::uint64_t sent_bytes,
                               int rank);
/// The error of an operation whose group is destroyed.
std::exception_ptr orphaned(const P2pOp& op, int rank);

}  // namespace ringcomm

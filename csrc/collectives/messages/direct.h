#pragma once

#include <cstdint>

#include "collectives/collective.h"
#include "collectives/messages/engine.h"
#include "collectives/messages/shares.h"

namespace ringcomm {

/// Collectives that send every byte directly to its destination: few steps, and reductions in rank
/// order with one rounding, at the cost of one message per pair. All return the bytes that peers
/// consumed from this rank, compare headers, and throw Stopped or Mismatched.

/// Every rank sends all it has to all, and reduces for itself. One step; N - 1 times the bytes.
std::uint64_t direct_all_reduce(MessageEngine& engine, const Collective& call,
                                const CallHeader& header);
/// Every rank sends each chunk to its owner, which reduces it into `output`.
std::uint64_t direct_reduce_scatter(MessageEngine& engine, const CallHeader& header,
                                    const MessageShares& shares);
/// Every rank sends its own chunk, in `output`, to all.
std::uint64_t direct_all_gather(MessageEngine& engine, const CallHeader& header,
                                const MessageShares& shares);

std::uint64_t direct_reduce(MessageEngine& engine, const Collective& call,
                            const CallHeader& header);
std::uint64_t direct_gather(MessageEngine& engine, const Collective& call,
                            const CallHeader& header);
std::uint64_t direct_scatter(MessageEngine& engine, const Collective& call,
                             const CallHeader& header);
std::uint64_t direct_all_to_all(MessageEngine& engine, const Collective& call,
                                const CallHeader& header);

}  // namespace ringcomm

#pragma once

#include <cstdint>

#include "collectives/messages/engine.h"
#include "collectives/messages/shares.h"

namespace ringcomm {

/// The ring over messages (collectives/ring.h). Each function returns the bytes that the next rank
/// consumed; headers and sizes must have been compared before.

/// Every rank ends with all chunks reduced, in `output`.
std::uint64_t ring_all_reduce(MessageEngine& engine, const MessageShares& shares);
/// Every rank ends with its own chunk reduced; the others' outputs are not touched.
std::uint64_t ring_reduce_scatter(MessageEngine& engine, const MessageShares& shares);
/// Every rank starts with its own chunk in `output`, and ends with all.
std::uint64_t ring_all_gather(MessageEngine& engine, const MessageShares& shares);

}  // namespace ringcomm

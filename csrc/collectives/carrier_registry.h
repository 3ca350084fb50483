#pragma once

#include <chrono>
#include <memory>

#include "collectives/carrier.h"
#include "collectives/communicator_options.h"
#include "transport/key_value_store.h"

namespace ringcomm {

/// The one place where a group's transport is chosen. Collective over the group, of 2 ranks at
/// least. Throws Error.
std::unique_ptr<Carrier> make_carrier(KeyValueStore& store, int rank, int world_size,
                                      const CommunicatorOptions& options,
                                      std::chrono::milliseconds timeout);

}  // namespace ringcomm

#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "collectives/carrier.h"
#include "collectives/communicator_options.h"
#include "transport/key_value_store.h"

namespace ringcomm {

class MessageTransport;

/// Makes the messages of a group: collective over it. Called at most once, and only where ranks
/// share no memory or messages are asked for. Throws Error. Empty where there are none.
using MakeMessages = std::function<std::unique_ptr<MessageTransport>()>;

/// The one place where a group's transport is chosen. Collective over the group, of 2 ranks at
/// least. Throws Error.
std::unique_ptr<Carrier> make_carrier(KeyValueStore& store, int rank, int world_size,
                                      const CommunicatorOptions& options,
                                      const MakeMessages& make_messages,
                                      std::chrono::milliseconds timeout);

}  // namespace ringcomm

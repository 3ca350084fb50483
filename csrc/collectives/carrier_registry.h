#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "collectives/carrier.h"
#include "collectives/communicator_options.h"
#include "transport/key_value_store.h"
#include "transport/membership.h"
#include "transport/wait_limits.h"

namespace ringcomm {

class MessageTransport;

/// Makes the messages of a group: collective over it; no rank has its own before all have made
/// theirs. Called at most once, and only where ranks share no memory or messages are asked for.
/// Throws Error, and what the function that it is given throws. Empty where there are none.
using MakeMessages = std::function<std::unique_ptr<MessageTransport>(const LookForRanks&)>;

/// What moves a group's bytes, and why it is that: for people.
struct ChosenCarrier {
  std::unique_ptr<Carrier> carrier;
  std::string reason;
};

/// The one place where a group's transport is chosen. Collective over the group, of 2 ranks at
/// least. Throws Error, and std::invalid_argument where messages are needed and there are none.
ChosenCarrier make_carrier(KeyValueStore& store, int rank, int world_size,
                           const CommunicatorOptions& options, const MakeMessages& make_messages,
                           const KnownProcesses& known, std::chrono::milliseconds timeout);

}  // namespace ringcomm

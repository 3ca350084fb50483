#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "collectives/carrier.h"
#include "collectives/communicator_options.h"
#include "transport/membership.h"
#include "transport/wait_limits.h"

namespace ringcomm {

class MessageTransport;

/// Creates the message transport of a group. Collective: it returns on no rank before all ranks
/// have created theirs. Called at most once, and only if ranks share no memory or messages are
/// requested. Throws Error, and what its LookForRanks throws. Empty if there is no backend for
/// messages.
using MakeMessages = std::function<std::unique_ptr<MessageTransport>(const LookForRanks&)>;

/// A carrier, and a readable description of the choice with its reason.
struct ChosenCarrier {
  std::unique_ptr<Carrier> carrier;
  std::string reason;
};

/// Chooses a group's transport; the only place that does. Collective over a group of at least 2
/// ranks. Throws Error, and std::invalid_argument if messages are needed but not available.
ChosenCarrier make_carrier(KeyValueStore& store, int rank, int world_size,
                           const CommunicatorOptions& options, const MakeMessages& make_messages,
                           const KnownProcesses& known, std::chrono::milliseconds timeout);

}  // namespace ringcomm

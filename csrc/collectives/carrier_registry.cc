#include "collectives/carrier_registry.h"

#include <stdexcept>

#include "collectives/shm_carrier.h"
#include "transport/roster.h"
#include "transport/shm/rendezvous.h"

namespace ringcomm {
namespace {

std::unique_ptr<MessageTransport> messages_from(const MakeMessages& make, const std::string& why) {
  if (make) return make();
  throw std::invalid_argument(why + ", and nothing is there that carries messages");
}

}  // namespace

ChosenCarrier make_carrier(KeyValueStore& store, int rank, int world_size,
                           const CommunicatorOptions& options, const MakeMessages& make_messages,
                           std::chrono::milliseconds timeout) {
  const bool is_p2p = options.transport == "p2p";
  shm::Rendezvous rendezvous(
      store,
      {.rank = rank,
       .world_size = world_size,
       .options = options.to_text(),
       .host_id = options.host_id},
      {.shared_bytes = is_p2p ? 0 : ShmCarrier::shared_bytes(world_size, options),
       .is_one_host = options.transport == "shm"},
      timeout);
  const Roster roster = rendezvous.find_ranks();
  if (is_p2p) {
    messages_from(make_messages, "transport is p2p");
    throw std::invalid_argument("transport p2p is not there yet; use shm");
  }
  if (roster.num_hosts() == 1)
    return {std::make_unique<ShmCarrier>(rendezvous, rank, world_size, options),
            "shm: " + roster.describe()};
  messages_from(make_messages, roster.describe());
  throw std::invalid_argument("several hosts are not there yet");
}

}  // namespace ringcomm

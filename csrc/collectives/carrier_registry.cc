#include "collectives/carrier_registry.h"

#include <stdexcept>

#include "collectives/hosts_carrier.h"
#include "collectives/message_carrier.h"
#include "collectives/shm_carrier.h"
#include "transport/messages/message_transport.h"
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
  if (roster.num_hosts() == 1 && !is_p2p)
    return {std::make_unique<ShmCarrier>(rendezvous, rank, world_size, options),
            "shm: " + roster.describe()};
  auto messages =
      messages_from(make_messages, is_p2p ? "the transport is p2p" : roster.describe());
  const std::string name = messages->name();
  if (is_p2p)
    return {std::make_unique<MessageCarrier>(store, std::move(messages), options, timeout),
            "p2p over " + name + ", as asked for; " + roster.describe()};
  if (roster.max_ranks_on_a_host() == 1)
    return {std::make_unique<MessageCarrier>(store, std::move(messages), options, timeout),
            "p2p over " + name + ", as no two ranks share a host; " + roster.describe()};
  return {
      std::make_unique<HostsCarrier>(store, roster, rank, std::move(messages), options, timeout),
      "shm inside a host, p2p over " + name + " between them; " + roster.describe()};
}

}  // namespace ringcomm

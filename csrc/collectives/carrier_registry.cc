#include "collectives/carrier_registry.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "collectives/hosts/carrier.h"
#include "collectives/shm/carrier.h"
#include "transport/messages/message_transport.h"
#include "transport/peer_table.h"
#include "transport/shm/rendezvous.h"

namespace ringcomm {

ChosenCarrier make_carrier(KeyValueStore& store, int rank, int world_size,
                           const CommunicatorOptions& options, const MakeMessages& make_messages,
                           const KnownProcesses& known, std::chrono::milliseconds timeout) {
  const bool is_p2p = options.transport == "p2p";
  shm::Rendezvous rendezvous(
      store,
      {.rank = rank,
       .world_size = world_size,
       .options = options.to_text(),
       .host_id = options.host_id,
       .known = known},
      {.shared_bytes = is_p2p ? 0 : ShmCarrier::shared_bytes(world_size, options),
       .is_one_host = options.transport == "shm"},
      timeout);
  const PeerTable peer_table = rendezvous.find_ranks();
  const std::string hosts = peer_table.describe();
  if (peer_table.num_hosts() == 1 && !is_p2p)
    return {std::make_unique<ShmCarrier>(rendezvous, peer_table, rank, options), "shm: " + hosts};

  if (!make_messages)
    throw std::invalid_argument((is_p2p ? "the transport is p2p" : hosts) +
                                ", but no backend for messages is available");
  std::string name;
  const MakeMessages make = [&](const LookForRanks& look) {
    auto messages = make_messages(look);
    name = messages->name();
    return messages;
  };
  const bool is_flat = is_p2p || peer_table.max_ranks_on_a_host() == 1;
  auto carrier = make_hosts_carrier(store, rendezvous, peer_table, options, make, is_flat);
  std::string reason =
      !is_flat ? "shm inside a host, p2p over " + name + " between them; "
               : "p2p over " + name +
                     (is_p2p ? ", as requested; " : ", because no two ranks share a host; ");
  return {std::move(carrier), reason + hosts};
}

}  // namespace ringcomm

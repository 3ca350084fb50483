#include "collectives/carrier_registry.h"

#include <stdexcept>

#include "collectives/message_carrier.h"
#include "collectives/shm_carrier.h"
#include "transport/messages/message_transport.h"

namespace ringcomm {

std::unique_ptr<Carrier> make_carrier(KeyValueStore& store, int rank, int world_size,
                                      const CommunicatorOptions& options,
                                      const MakeMessages& make_messages,
                                      std::chrono::milliseconds timeout) {
  if (options.transport == "p2p") {
    if (!make_messages) throw std::invalid_argument("transport p2p: nothing carries the messages");
    return std::make_unique<MessageCarrier>(store, rank, world_size, options, make_messages,
                                            timeout);
  }
  return std::make_unique<ShmCarrier>(store, rank, world_size, options, timeout);
}

}  // namespace ringcomm

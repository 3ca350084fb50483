#pragma once

#include <memory>

#include "collectives/failure.h"
#include "collectives/messages/members.h"
#include "collectives/p2p.h"
#include "collectives/carrier.h"
#include "transport/messages/message_transport.h"

namespace ringcomm {

/// Users' sends and receives over messages. All arguments must live as long. A send is complete
/// when its receiver has taken it, so its process may end then.
std::unique_ptr<PointToPoint> make_message_p2p(MessageTransport& transport, MessageMembers& members,
                                               Failure& failure, Stats& stats);

}  // namespace ringcomm

#pragma once

#include <optional>

#include "collectives/collective.h"
#include "collectives/hosts/engine.h"
#include "collectives/messages/exchange.h"

namespace ringcomm {

/// Checks that all ranks made the same call before any data depends on it: inside each host on the
/// board, and between hosts by their leaders. Each leader first receives the header of the leader
/// before it, in this greeting or in hosts_barrier(). So some rank always detects a difference and
/// reports it to all.

/// Compares the calls of this host's ranks, and their sizes pair by pair. All of them throw the
/// same Mismatched. No rank returns before all have arrived.
void agree_inside_host(HostsEngine& engine, const Collective& call, const CallHeader& header);

/// Compares the calls of this host and of the one before it; does nothing on ranks that are not
/// leaders. For collectives that then receive data from all hosts with its headers, which compare
/// the rest. The greeting follows the same path for every collective, so no rank waits for data
/// that will not arrive. It starts immediately and overlaps with the data.
class HostsGreeting {
 public:
  HostsGreeting(HostsEngine& engine, const CallHeader& header);
  /// Must be called before this rank waits for anything that another host sends, or for a rank that
  /// does. Later calls do nothing. Throws Stopped, Mismatched.
  void finish();

 private:
  HostsEngine& engine_;
  std::optional<MessageExchange> exchange_;
};

}  // namespace ringcomm

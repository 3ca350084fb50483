#pragma once

#include <optional>

#include "collectives/collective.h"
#include "collectives/hosts/engine.h"
#include "collectives/messages/exchange.h"

namespace ringcomm {

/// That all ranks made the same call, found out before any data depends on it: inside each host on
/// the board, and between hosts by their leaders, each of whom hears of the one before it first, in
/// this greeting or in hosts_barrier(). So a difference is always found by some rank, which tells
/// all.

/// Compares the calls of this host's ranks, and their sizes pair by pair. All of them throw alike:
/// Mismatched. No rank returns before all have come.
void agree_inside_host(HostsEngine& engine, const Collective& call, const CallHeader& header);

/// Compares the calls of this host and of the one before it; does nothing on ranks that lead no
/// host. For collectives in which data of all hosts follows, with their headers: those compare the
/// rest, and this one, which goes the same way whatever the collective, sees to it that nobody
/// waits for data that will not come. Starts at once, and costs no time of its own beside data.
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

#include "cuda/messages/peer_watch.h"

#include <tuple>
#include <utility>

namespace ringcomm {
namespace {

constexpr std::chrono::milliseconds kLookInterval{50};
// Reports of ranks on other hosts are in the store, which all ranks poll.
constexpr int kLooksPerQuestion = 4;

}  // namespace

PeerWatch::PeerWatch(Communicator& communicator, std::chrono::milliseconds timeout,
                     std::function<void()> ended)
    : communicator_(communicator),
      timeout_(timeout),
      ended_(std::move(ended)),
      thread_("ringcomm-p2p", {.interval = kLookInterval, .num_looks = timeout / kLookInterval + 1},
              [this] { return goes_on(); }) {}

void PeerWatch::note_call(const CallHeader* header, bool is_captured) {
  {
    const std::lock_guard lock(mutex_);
    last_ = header != nullptr ? std::optional(*header) : std::nullopt;
  }
  if (is_captured) thread_.stay_awake();
  thread_.wake();
}

Activity PeerWatch::activity() {
  const std::lock_guard lock(mutex_);
  if (!last_) return {.op = "send", .description = "sends and receives", .timeout = timeout_};
  return {.op = name_of(last_->op),
          .seq = static_cast<std::int64_t>(last_->seq),
          .description = describe(*last_),
          .timeout = timeout_};
}

// A rank that has left has ended its calls before; whether it made this one the hosts compare.
bool PeerWatch::goes_on() {
  Membership& members = *communicator_.members();
  std::ignore = members.is_given_up(/*asks=*/++num_looks_ % kLooksPerQuestion == 0);
  for (int peer = 0; peer < communicator_.world_size(); ++peer) {
    if (peer == communicator_.rank()) continue;
    const Stop state = members.state_of(peer);
    if (state != Stop::kPeerDied && state != Stop::kAborted) continue;
    try {
      communicator_.failure().raise_stopped(state, peer, activity());
    } catch (const std::exception&) {
      // The error is kept for the next call or wait.
    }
    ended_();
    return false;
  }
  return true;
}

}  // namespace ringcomm

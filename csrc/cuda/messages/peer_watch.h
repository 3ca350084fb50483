#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>

#include "collectives/communicator.h"
#include "transport/watch_thread.h"

namespace ringcomm {

/// A watchdog that ends the group when a rank dies or fails while messages of device tensors are in
/// flight. The backend of these messages may wait for the rank without end.
class PeerWatch {
 public:
  /// `ended` is called once, from another thread. It watches until `timeout`, the timeout of the
  /// group's calls, has passed after the last call.
  PeerWatch(Communicator& communicator, std::chrono::milliseconds timeout,
            std::function<void()> ended);

  /// Call it when messages start, of a collective or, without `header`, of a user; with
  /// `is_captured` they may start at any time from now on.
  void note_call(const CallHeader* header, bool is_captured);

 private:
  bool goes_on();
  Activity activity();

  Communicator& communicator_;
  std::chrono::milliseconds timeout_;
  std::function<void()> ended_;
  int num_looks_ = 0;  // the thread's
  std::mutex mutex_;
  std::optional<CallHeader> last_;  // guarded by mutex_
  WatchThread thread_;              // last: it uses all of the above
};

}  // namespace ringcomm

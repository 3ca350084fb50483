#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <optional>

#include "collectives/communicator.h"
#include "collectives/watch_thread.h"

namespace ringcomm {

/// Notices that a rank has died, or given the group up, while messages of device tensors are under
/// way: whoever carries them may wait for it for ever. Ends the group then.
class PeerWatch {
 public:
  /// `ended` is told, once and from another thread. `timeout` is of the group's calls: so long
  /// after the last one it looks.
  PeerWatch(Communicator& communicator, std::chrono::milliseconds timeout,
            std::function<void()> ended);

  /// Messages are under way, of a collective or, without `header`, a user's; with `is_captured`
  /// they may be at any time from now on.
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

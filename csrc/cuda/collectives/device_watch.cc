#include "cuda/collectives/device_watch.h"

#include "collectives/call.h"

namespace ringcomm::cuda {
namespace {

constexpr WatchThread::Pace kPace{.interval = std::chrono::milliseconds(20), .num_looks = 1};
// At so many looks a kernel must have waited anew for a peer that is gone. The first waits may have
// been before the peer published its last phase and left; what it published then ends them.
constexpr int kWaitsForGonePeer = 3;

std::uint64_t two_words(const std::uint32_t* words) {
  return words[0] | std::uint64_t{words[1]} << 32;
}

std::string describe_message(const std::uint32_t* words) {
  return "the received message has " + std::to_string(two_words(words)) + " bytes and tag " +
         std::to_string(static_cast<std::int32_t>(words[4])) +
         "; messages between GPUs are received in the order in which they were sent";
}

}  // namespace

DeviceWatch::DeviceWatch(Communicator& communicator, Control& control, GroupWords& words,
                         std::chrono::milliseconds timeout,
                         std::function<void(const std::string&)> report,
                         std::function<void()> look_at_memory)
    : communicator_(communicator),
      control_(control),
      words_(words),
      timeout_(timeout),
      report_(std::move(report)),
      look_at_memory_(std::move(look_at_memory)),
      thread_(kPace, [this] { return goes_on(); }) {}

void DeviceWatch::record_call(std::uint64_t number, const HeaderWords& header) {
  GroupWords::OfRank& mine = words_.ranks[communicator_.rank()];
  GroupWords::Launch& entry = mine.launches[number % GroupWords::kNumLaunches];
  // A reader that sees the same even state before and after has read one entry: no word of the next
  // entry is visible before its odd state.
  entry.number_and_state = 2 * number + 1;
  for (std::size_t i = 0; i < header.size(); ++i)
    entry.header[i].store(header[i], std::memory_order_release);
  entry.number_and_state = 2 * (number + 1);
  mine.num_launches = number + 1;
}

// False where the entry is no longer, or not yet, there.
bool DeviceWatch::read(int rank, std::uint64_t number, HeaderWords& header) const {
  const GroupWords::Launch& entry = words_.ranks[rank].launches[number % GroupWords::kNumLaunches];
  const std::uint64_t wanted = 2 * (number + 1);
  if (entry.number_and_state != wanted) return false;
  for (std::size_t i = 0; i < header.size(); ++i)
    header[i] = entry.header[i].load(std::memory_order_acquire);
  return entry.number_and_state == wanted;
}

Activity DeviceWatch::activity_of(std::uint64_t number) const {
  if (number == GroupFrame::kNoNumber)
    return {.op = "a call", .description = "a message or a call of a graph", .timeout = timeout_};
  Activity activity{.op = "a call",
                    .seq = static_cast<std::int64_t>(number),
                    .description = "a call on the GPU",
                    .timeout = timeout_};
  HeaderWords words;
  if (!read(communicator_.rank(), number, words)) return activity;
  const CallHeader header = from_words(words.data(), number);
  activity.op = name_of(header.op);
  activity.description = describe(header);
  return activity;
}

bool DeviceWatch::goes_on() {
  try {
    communicator_.failure().rethrow_if_any();  // another thread has thrown it
    look_at_record();
    look_at_wait();
    compare_calls();
    look_at_memory_();
    return true;
  } catch (const std::exception& error) {
    // The group has failed on this rank or another; the next call throws the reason. The other
    // ranks were notified first, because kernels that run after an aborted one may write data that
    // theirs would accept.
    end_waits();
    report_(error.what());
    return false;
  }
}

void DeviceWatch::look_at_record() {
  const std::uint32_t stop = __atomic_load_n(&control_.stop, __ATOMIC_ACQUIRE);
  if (stop == 0) return;
  const int peer = control_.peer;
  const Activity activity = activity_of(control_.launch);
  const CallHeader theirs = from_words(control_.theirs, control_.launch);
  const std::string difference =
      stop == kMismatch ? describe_difference(peer, theirs, activity.op)
      : stop == kShardDiffers
          ? size_difference(peer, two_words(control_.theirs), communicator_.rank(),
                            two_words(control_.theirs + 2))
      : stop == kP2pDiffers ? describe_message(control_.theirs)
      : stop == kOverlap
          ? "two calls of this group ran at the same time on rank " + std::to_string(peer) +
                ": a replayed graph is not ordered with calls on another stream; use "
                "one stream, or an event between them"
          : "";
  if (!difference.empty()) communicator_.failure().raise_mismatch(peer, difference, activity);
  communicator_.failure().raise_stopped(static_cast<WaitStatus>(stop), peer, activity);
}

void DeviceWatch::look_at_wait() {
  const std::uint32_t asked_at = __atomic_load_n(&control_.asked_at, __ATOMIC_RELAXED);
  if (std::exchange(asked_at_, asked_at) == asked_at) return;
  const int peer = __atomic_load_n(&control_.awaited_peer, __ATOMIC_RELAXED);
  const WaitStatus stop = communicator_.group_state()->state_of(peer);
  if (stop == WaitStatus::kNone) return;
  if (stop != WaitStatus::kAborted && ++num_waits_for_gone_ < kWaitsForGonePeer) return;
  const std::uint64_t num = num_recorded(communicator_.rank());
  communicator_.failure().raise_stopped(stop, peer, activity_of(num > 0 ? num - 1 : 0));
}

void DeviceWatch::compare_calls() {
  if (words_.has_captured != 0) return;
  const int rank = communicator_.rank();
  for (; num_compared_ < num_recorded(rank); ++num_compared_) {
    HeaderWords own, words;
    if (!read(rank, num_compared_, own)) continue;
    for (int peer = 0; peer < communicator_.world_size(); ++peer) {
      if (peer == rank) continue;
      if (num_recorded(peer) <= num_compared_) return;  // it has not launched that call yet
      if (!read(peer, num_compared_, words) || words == own) continue;
      const CallHeader theirs = from_words(words.data(), num_compared_);
      const Activity activity = activity_of(num_compared_);
      communicator_.failure().raise_mismatch(peer, describe_difference(peer, theirs, activity.op),
                                             activity);
    }
  }
}

}  // namespace ringcomm::cuda

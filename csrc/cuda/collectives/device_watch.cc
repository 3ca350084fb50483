#include "cuda/collectives/device_watch.h"

#include "core/errors.h"

namespace ringcomm::cuda {
namespace {

constexpr WatchThread::Pace kPace{.interval = std::chrono::milliseconds(20), .num_looks = 1};

std::uint64_t two_words(const std::uint32_t* words) {
  return words[0] | std::uint64_t{words[1]} << 32;
}

std::string describe_sizes(const std::uint32_t* words) {
  return "rank " + std::to_string(words[0]) + " has " + std::to_string(two_words(words + 2)) +
         " bytes for rank " + std::to_string(words[1]) + ", which has room for " +
         std::to_string(two_words(words + 4));
}

std::string describe_message(const std::uint32_t* words) {
  return "the received message has " + std::to_string(two_words(words)) + " bytes and tag " +
         std::to_string(static_cast<std::int32_t>(words[2])) +
         "; messages between GPUs are received in the order in which they were sent";
}

}  // namespace

void CallBoard::note(std::uint64_t number, const HeaderWords& header) {
  GroupWords::OfRank& mine = words_.ranks[rank_];
  GroupWords::Launch& entry = mine.launches[number % GroupWords::kNumLaunches];
  // A reader that sees the same even state before and after has read one entry: no word of the next
  // entry is visible before its odd state.
  entry.number_and_state = 2 * number + 1;
  for (std::size_t i = 0; i < header.size(); ++i)
    entry.header[i].store(header[i], std::memory_order_release);
  entry.number_and_state = 2 * (number + 1);
  mine.num_launches = number + 1;
}

bool CallBoard::read(int rank, std::uint64_t number, HeaderWords& header) const {
  const GroupWords::Launch& entry = words_.ranks[rank].launches[number % GroupWords::kNumLaunches];
  const std::uint64_t wanted = 2 * (number + 1);
  if (entry.number_and_state != wanted) return false;
  for (std::size_t i = 0; i < header.size(); ++i)
    header[i] = entry.header[i].load(std::memory_order_acquire);
  return entry.number_and_state == wanted;
}

DeviceWatch::DeviceWatch(const Subject& subject, std::function<void(const std::string&)> report)
    : subject_(subject),
      report_(std::move(report)),
      thread_("ringcomm-gpu", kPace, [this] { return goes_on(); }) {}

void DeviceWatch::note_launch() { thread_.stay_awake(); }

void DeviceWatch::end_waits() { __atomic_store_n(&subject_.control.abort, 1u, __ATOMIC_RELEASE); }

bool DeviceWatch::goes_on() {
  try {
    look();
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

void DeviceWatch::look() {
  if (subject_.failure.has_failed()) {
    // Another thread reported the failure and has thrown it.
    end_waits();
    return;
  }
  look_at_record();
  look_at_wait();
  compare_calls();
}

Activity DeviceWatch::activity_of(std::uint64_t number) const {
  const bool is_known = number != GroupFrame::kNoNumber;
  Activity activity{
      .op = "a call",
      .seq = is_known ? static_cast<std::int64_t>(number) : -1,
      .description = is_known ? "a call on the GPU" : "a message or a call of a graph",
      .timeout = subject_.timeout};
  HeaderWords words;
  if (!is_known || !subject_.calls.read(subject_.rank, number, words)) return activity;
  CallHeader header = from_words(words.data());
  header.seq = number;
  activity.op = name_of(header.op);
  activity.description = describe(header);
  return activity;
}

void DeviceWatch::look_at_record() {
  Control& control = subject_.control;
  const std::uint32_t stop = __atomic_load_n(&control.stop, __ATOMIC_ACQUIRE);
  if (stop == 0) return;
  const Activity activity = activity_of(control.launch);
  if (stop == kMismatch) {
    CallHeader theirs = from_words(control.theirs);
    theirs.seq = control.launch;
    subject_.failure.raise_mismatch(
        control.peer, describe_difference(control.peer, theirs, activity.op), activity);
  }
  if (stop == kSizesDiffer)
    subject_.failure.raise_mismatch(control.peer, describe_sizes(control.theirs), activity);
  if (stop == kP2pDiffers)
    subject_.failure.raise_mismatch(control.peer, describe_message(control.theirs), activity);
  if (stop == kOverlap)
    subject_.failure.raise_mismatch(
        control.peer,
        "two calls of this group ran at the same time on rank " + std::to_string(control.peer) +
            ": a replayed graph is not ordered with calls on another stream; use one stream, or "
            "an event between them",
        activity);
  subject_.failure.raise_stopped(static_cast<Stop>(stop), control.peer, activity);
}

void DeviceWatch::look_at_wait() {
  Control& control = subject_.control;
  const std::uint32_t asked_at = __atomic_load_n(&control.asked_at, __ATOMIC_RELAXED);
  if (std::exchange(asked_at_, asked_at) == asked_at) return;
  const int peer = __atomic_load_n(&control.awaited_peer, __ATOMIC_RELAXED);
  const Stop stop = subject_.members.state_of(peer);
  if (stop == Stop::kNone) return;
  const std::uint64_t num_noted = subject_.calls.num_noted(subject_.rank);
  subject_.failure.raise_stopped(stop, peer, activity_of(num_noted > 0 ? num_noted - 1 : 0));
}

void DeviceWatch::compare_calls() {
  const std::uint64_t mine = subject_.calls.num_noted(subject_.rank);
  for (; num_compared_ < mine; ++num_compared_) {
    HeaderWords own;
    if (!subject_.calls.read(subject_.rank, num_compared_, own)) continue;
    for (int peer = 0; peer < subject_.world_size; ++peer) {
      if (peer == subject_.rank) continue;
      if (subject_.calls.num_noted(peer) <= num_compared_)
        return;  // it has not launched that call yet
      HeaderWords theirs;
      if (!subject_.calls.read(peer, num_compared_, theirs) || theirs == own) continue;
      CallHeader header = from_words(theirs.data());
      header.seq = num_compared_;
      const Activity activity = activity_of(num_compared_);
      subject_.failure.raise_mismatch(peer, describe_difference(peer, header, activity.op),
                                      activity);
    }
  }
}

}  // namespace ringcomm::cuda

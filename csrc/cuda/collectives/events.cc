#include "cuda/collectives/events.h"

#include <unistd.h>

#include "cuda/collectives/unavailable.h"
#include "cuda/driver/per_device.h"

namespace ringcomm::cuda {

Event::Event(unsigned flags) { check(driver().event_create(&event_, flags), "make an event"); }

Event::~Event() { driver().event_destroy(event_); }

void Event::record(StreamHandle stream) {
  check(driver().event_record(event_, stream), "record an event");
}

void Event::block(StreamHandle stream) const {
  check(driver().stream_wait_event(stream, event_, 0), "make a stream wait for an event");
}

bool Event::is_over() const {
  const Result result = driver().event_query(event_);
  if (result != kErrorNotReady) check(result, "ask whether an event is over");
  return result == kSuccess;
}

EventPool& EventPool::of(DeviceOrdinal device) {
  return per_device<EventPool>(device, [] { return std::unique_ptr<EventPool>(new EventPool); });
}

std::shared_ptr<Event> EventPool::record(StreamHandle stream) {
  std::unique_ptr<Event> event;
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      event = std::move(free_.back());
      free_.pop_back();
    }
  }
  if (event == nullptr) event = std::make_unique<Event>();
  event->record(stream);
  return {event.release(), [this](Event* used) {
            const std::lock_guard lock(mutex_);
            free_.emplace_back(used);
          }};
}

SideStream::SideStream() {
  check(driver().stream_create(&stream_, kStreamNonBlocking), "make a stream");
}

SideStream::~SideStream() { driver().stream_destroy(stream_); }

void SideStream::finish() const { check(driver().stream_synchronize(stream_), "wait for the GPU"); }

std::uint64_t capture_of(StreamHandle stream) {
  int status = kCaptureNone;
  unsigned long long id = 0;
  check(driver().stream_get_capture_info(stream, &status, &id, nullptr, nullptr, nullptr),
        "ask a stream whether it is captured");
  // One that is broken has no number any more.
  constexpr std::uint64_t kBroken = ~std::uint64_t{0};
  return status == kCaptureNone ? 0 : status == kCaptureActive ? id : kBroken;
}

void StreamOrder::wait(const StreamPlace& place) const {
  const auto found = captured_.find(place.capture);
  if (place.capture != 0 && found == captured_.end()) return;
  const Last& last = place.capture == 0 ? run_ : found->second;
  if (last.end != nullptr && last.stream != place.stream) last.end->block(place.stream);
}

void StreamOrder::note(std::shared_ptr<const Event> end, const StreamPlace& place) {
  constexpr std::size_t kMostCaptures = 16;
  (place.capture == 0 ? run_ : captured_[place.capture]) = {std::move(end), place.stream};
  if (captured_.size() > kMostCaptures) captured_.erase(captured_.begin());
}

void StreamOrder::synchronize() const {
  if (run_.end != nullptr) check(driver().event_synchronize(run_.end->get()), "wait for the GPU");
}

namespace {

struct EventRecords {
  std::array<IpcEventHandle, 2> handles = {};
  std::array<EventHandle, 2> events = {};
  std::int64_t pid = 0;
  RecordText<256> problem;
};

}  // namespace

TurnEvents::TurnEvents(RecordExchange& exchange, Leaving& leaving)
    : rank_(exchange.rank()), peers_(static_cast<std::size_t>(exchange.world_size())) {
  EventRecords mine;
  mine.pid = ::getpid();
  mine.problem = attempt([&] {
    for (std::size_t i = 0; i < own_.size(); ++i) {
      own_[i] = std::make_shared<Event>(kEventDisableTiming | kEventInterprocess);
      leaving.keep(own_[i]);
      mine.events[i] = own_[i]->get();
      check(driver().ipc_get_event_handle(&mine.handles[i], own_[i]->get()),
            "hand out an event of the GPU");
    }
  });
  const auto records = exchange.all_gather(mine);
  const RecordText<256> opening = attempt([&] {
    for (std::size_t peer = 0; peer < records.size(); ++peer) {
      const EventRecords& theirs = records[peer];
      if (!theirs.problem.str().empty()) continue;
      if (theirs.pid == mine.pid) {
        peers_[peer] = theirs.events;
        continue;
      }
      for (std::size_t i = 0; i < own_.size(); ++i) {
        check(driver().ipc_open_event_handle(&peers_[peer][i], theirs.handles[i]),
              "open another rank's event");
        opened_.emplace_back(peers_[peer][i]);
      }
    }
  });
  if (mine.problem.str().empty()) mine.problem = opening;
  const auto verdicts = exchange.all_gather(mine);
  for (std::size_t peer = 0; peer < verdicts.size(); ++peer)
    if (const std::string problem = verdicts[peer].problem.str(); !problem.empty())
      throw Unavailable("rank " + std::to_string(peer) + ": " + problem);
}

void TurnEvents::record(std::uint64_t turn, StreamHandle stream) { own_[turn % 2]->record(stream); }

bool TurnEvents::are_over(int peer) const {
  for (EventHandle event : peers_[static_cast<std::size_t>(peer)])
    if (driver().event_query(event) != kSuccess) return false;
  return true;
}

void TurnEvents::block(std::uint64_t turn, StreamHandle stream) const {
  for (std::size_t peer = 0; peer < peers_.size(); ++peer)
    if (static_cast<int>(peer) != rank_)
      check(driver().stream_wait_event(stream, peers_[peer][turn % 2], 0),
            "make a stream wait for another rank's event");
}

}  // namespace ringcomm::cuda

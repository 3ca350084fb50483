#include "collectives/cuda/device_group.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

#include "collectives/cuda/kernels.h"
#include "collectives/cuda/unavailable.h"
#include "core/errors.h"
#include "transport/shm/process_hub.h"
#include "transport/shm/rank_record.h"

namespace ringcomm::cuda {
namespace {

using Text = RecordText<256>;

// Of all kernels this takes the most registers.
constexpr const char* kLargestKernel = "ringcomm_two_shot_bfloat16";

int attribute_of(DeviceOrdinal device, DeviceAttribute attribute) {
  int value = 0;
  check(driver().device_get_attribute(&value, attribute, device), "ask the GPU for its attributes");
  return value;
}

// Of all groups of this process.
struct DeviceUses {
  std::mutex mutex;
  std::map<DeviceOrdinal, int> num_groups;
  std::map<DeviceOrdinal, int> most_ranks;

  static DeviceUses& all() {
    static DeviceUses& uses = *new DeviceUses;  // threads may use it until the process has ended
    return uses;
  }
};

}  // namespace

DeviceGroup::Use::Use(DeviceOrdinal device) : device_(device) {
  DeviceUses& uses = DeviceUses::all();
  const std::lock_guard lock(uses.mutex);
  is_first_ = uses.num_groups[device_]++ == 0;
}
DeviceGroup::Use::~Use() {
  DeviceUses& uses = DeviceUses::all();
  const std::lock_guard lock(uses.mutex);
  --uses.num_groups[device_];
}
int DeviceGroup::Use::num_ranks() const {
  DeviceUses& uses = DeviceUses::all();
  const std::lock_guard lock(uses.mutex);
  return uses.most_ranks[device_];
}
void DeviceGroup::Use::note_ranks(int num_ranks) {
  DeviceUses& uses = DeviceUses::all();
  const std::lock_guard lock(uses.mutex);
  int& most = uses.most_ranks[device_];
  most = std::max(most, num_ranks);
}

struct DeviceGroup::Place {
  DeviceUuid device = {};
  RecordText<64> host_id;
  RecordText<112> hub_address;
  std::int64_t pid = 0;
  int num_multiprocessors = 0;
  int blocks_per_multiprocessor = 0;
  bool has_mps = false;
  bool has_fds = false;
  bool is_first = false;
  int ranks_on_device = 0;
  Text problem;
};

DeviceGroup::DeviceGroup(RecordExchange& exchange, DeviceOrdinal device, std::size_t host_bytes)
    : device_(device), use_(device) {
  if (exchange.world_size() > kMaxRanks)
    throw Unavailable("a group of " + std::to_string(exchange.world_size()) +
                      " ranks is larger than " + std::to_string(kMaxRanks));
  const std::vector<Place> places = find_places(exchange);
  std::vector<Text> problems;
  for (const Place& place : places) problems.push_back(place.problem);
  check_problems(problems);
  read_facts(places);
  use_.note_ranks(facts_.ranks_on_device);
  staging_.layout = make_staging_layout(facts_);
  const bool have_fds =
      std::all_of(places.begin(), places.end(), [](const Place& place) { return place.has_fds; });
  kind_ = have_fds ? HandleKind::kFd : HandleKind::kIpc;
  try {
    share_staging(exchange);
  } catch (const Unavailable&) {
    if (kind_ == HandleKind::kIpc) throw;
    // All ranks are here with the same reason, and none has a part of the others' memory.
    kind_ = HandleKind::kIpc;
    share_staging(exchange);
  }
  share_host_memory(exchange, host_bytes);
  description_ = describe();
}

std::string DeviceGroup::describe() const {
  char megabytes[32];
  std::snprintf(megabytes, sizeof megabytes, "%.1f",
                static_cast<double>(staging_.layout.num_bytes()) / (1 << 20));
  return std::string("cuda_ipc by ") + name_of(kind_) + ": " +
         std::to_string(facts_.max_ranks_per_device) + " ranks on a GPU" +
         (facts_.takes_turns                ? ", taking turns (no MPS)"
          : facts_.max_ranks_per_device > 1 ? ", side by side"
                                            : "") +
         ", " + std::to_string(staging_.layout.num_blocks) + " blocks, " + megabytes +
         " MiB of staging each";
}

std::vector<DeviceGroup::Place> DeviceGroup::find_places(RecordExchange& exchange) {
  Place mine;
  mine.host_id = RecordText<64>(shm::host_id());
  mine.pid = ::getpid();
  mine.is_first = use_.is_first();
  mine.ranks_on_device = use_.num_ranks();
  mine.problem = attempt([&] {
    mine.hub_address = RecordText<112>(shm::ProcessHub::instance().address());
    check(driver().device_get_uuid(&mine.device, device_), "ask the GPU for its name");
    mine.num_multiprocessors = attribute_of(device_, kMultiprocessorCount);
    mine.has_mps = attribute_of(device_, kMpsEnabled) != 0;
    mine.has_fds = best_handle_kind(device_) == HandleKind::kFd;
    mine.blocks_per_multiprocessor = Kernels::of(device_).blocks_per_multiprocessor(kLargestKernel);
  });
  return exchange.all_gather(mine);
}

void DeviceGroup::read_facts(const std::vector<Place>& places) {
  facts_.world_size = static_cast<int>(places.size());
  facts_.min_multiprocessors = places[0].num_multiprocessors;
  facts_.blocks_per_multiprocessor = places[0].blocks_per_multiprocessor;
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    const Place& place = places[rank];
    places_.push_back({place.device, place.hub_address.str(), place.pid});
    if (place.host_id.str() != places[0].host_id.str())
      throw Unavailable("rank 0 and rank " + std::to_string(rank) + " are on different hosts");
    facts_.min_multiprocessors = std::min(facts_.min_multiprocessors, place.num_multiprocessors);
    facts_.blocks_per_multiprocessor =
        std::min(facts_.blocks_per_multiprocessor, place.blocks_per_multiprocessor);
    int sharing = 0;
    for (const Place& other : places) {
      if (std::memcmp(&place.device, &other.device, sizeof place.device) != 0) continue;
      ++sharing;
      // Processes whose contexts the driver gives the GPU in turns.
      if (other.pid != place.pid && !(place.has_mps && other.has_mps)) facts_.takes_turns = true;
    }
    facts_.max_ranks_per_device = std::max(facts_.max_ranks_per_device, sharing);
    facts_.ranks_on_device = std::max({facts_.ranks_on_device, sharing, place.ranks_on_device});
    facts_.is_first = facts_.is_first && place.is_first;
  }
  if (facts_.min_multiprocessors * facts_.blocks_per_multiprocessor < facts_.max_ranks_per_device &&
      !facts_.takes_turns)
    throw Unavailable("a GPU has no room for a block of each of its " +
                      std::to_string(facts_.max_ranks_per_device) + " ranks");
}

void DeviceGroup::share_staging(RecordExchange& exchange) {
  segment_ =
      std::make_unique<Segment>(exchange, device_, places_, kind_, staging_.layout.num_bytes());
  for (int rank = 0; rank < exchange.world_size(); ++rank) staging_.of[rank] = segment_->of(rank);
}

// Rank 0 makes it; each rank has a control block of its own besides.
void DeviceGroup::share_host_memory(RecordExchange& exchange, std::size_t num_bytes) {
  shm::ProcessHub& hub = shm::ProcessHub::instance();
  struct Offer {
    RecordText<160> key;
    Text problem;
  } mine;
  mine.problem = attempt([&] {
    control_ = std::make_unique<MappedHostMemory>(device_, sizeof(Control));
    new (control_->host()) Control;
    if (exchange.rank() != 0) return;
    const std::string key = new_offer_key();
    shm::UniqueFd fd = shm::create_memfd(num_bytes, "ringcomm-cuda");
    host_memory_ = shm::SharedMemory(fd.get(), num_bytes);
    hub.offer(key, std::move(fd));
    mine.key = RecordText<160>(key);
  });
  const std::vector<Offer> offers = exchange.all_gather(mine);
  const std::string key = offers[0].key.str();
  Text problem = mine.problem;
  if (problem.str().empty() && exchange.rank() != 0)
    problem = attempt(
        [&] { host_memory_ = shm::SharedMemory(fetch_from(places_[0], 0, key).get(), num_bytes); });
  const std::vector<Text> problems = exchange.all_gather(problem);
  if (exchange.rank() == 0 && !key.empty()) hub.withdraw(key);
  check_problems(problems);
}

}  // namespace ringcomm::cuda

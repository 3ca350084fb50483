#include "cuda/collectives/device_group.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>

#include "core/chunk_layout.h"
#include "core/errors.h"
#include "cuda/collectives/kernels.h"
#include "cuda/collectives/unavailable.h"
#include "transport/peer_table.h"
#include "transport/shm/bootstrap.h"

namespace ringcomm::cuda {
namespace {

using Text = RecordText<256>;

int attribute_of(DeviceOrdinal device, DeviceAttribute attribute) {
  int value = 0;
  check(driver().device_get_attribute(&value, attribute, device), "ask the GPU for its attributes");
  return value;
}

constexpr const char* kNoMps = "start MPS (nvidia-cuda-mps-control -d) before the ranks";
constexpr const char* kNoRoom =
    "other groups use all of the GPU's room for kernels that wait for other ranks: destroy groups "
    "that are no longer used, or use this one first";

}  // namespace

struct DeviceGroup::Place {
  DeviceUuid device = {};
  RecordText<64> host_id;
  RecordText<112> bootstrap_address;
  std::int64_t pid = 0;
  int num_multiprocessors = 0;
  bool has_mps = false;
  bool has_fds = false;
  int free_seats = 0;
  Text problem;
};

DeviceGroup::DeviceGroup(RecordExchange& exchange, DeviceOrdinal device, std::size_t host_bytes)
    : device_(device) {
  if (exchange.world_size() > kMaxRanks)
    throw Unavailable("a group of " + std::to_string(exchange.world_size()) +
                      " ranks is larger than " + std::to_string(kMaxRanks));
  const std::vector<Place> places = find_places(exchange);
  std::vector<Text> problems;
  for (const Place& place : places) problems.push_back(place.problem);
  check_problems(problems);
  read_facts(places);
  take_seats(exchange);
  staging_.layout = make_staging_layout(facts_);
  const bool have_fds =
      std::all_of(places.begin(), places.end(), [](const Place& place) { return place.has_fds; });
  kind_ = have_fds ? HandleKind::kFd : HandleKind::kIpc;
  share_host_memory(exchange, own_host_bytes() + host_bytes);
  leaving_ = std::make_unique<Leaving>(host_memory_.data(), exchange.rank(), places_);
  mail_room_ = std::make_unique<MailRoom>(host_memory_.data() + Leaving::num_bytes(world_size()),
                                          exchange.rank(), places_, staging_.layout);
  try {
    share_staging(exchange);
  } catch (const Unavailable&) {
    if (kind_ == HandleKind::kIpc) throw;
    // All ranks are here with the same reason, and none has a part of the others' memory.
    kind_ = HandleKind::kIpc;
    share_staging(exchange);
  }
  description_ = describe();
}

std::string DeviceGroup::describe() const {
  char megabytes[32];
  std::snprintf(megabytes, sizeof megabytes, "%.1f",
                static_cast<double>(staging_.layout.num_bytes()) / (1 << 20));
  return std::string("cuda_ipc by ") + name_of(kind_) + ": " +
         std::to_string(facts_.max_ranks_per_device) + " ranks on a GPU" +
         (facts_.takes_turns
              ? (why_turns_ == kNoMps ? ", taking turns (no MPS)" : ", taking turns (no room)")
          : facts_.max_ranks_per_device > 1 ? ", side by side"
                                            : "") +
         ", " + std::to_string(staging_.layout.num_blocks) + " blocks, " + megabytes +
         " MiB of staging each";
}

std::vector<DeviceGroup::Place> DeviceGroup::find_places(RecordExchange& exchange) {
  Place mine;
  mine.host_id = RecordText<64>(host_id());
  mine.pid = ::getpid();
  mine.problem = attempt([&] {
    mine.bootstrap_address = RecordText<112>(shm::Bootstrap::instance().address());
    check(driver().device_get_uuid(&mine.device, device_), "ask the GPU for its name");
    mine.num_multiprocessors = attribute_of(device_, kMultiprocessorCount);
    mine.has_mps = attribute_of(device_, kMpsEnabled) != 0;
    mine.has_fds = best_handle_kind(device_) == HandleKind::kFd;
    Kernels::of(device_);  // a device that cannot run them is found out before any memory is shared
    room_ = std::make_unique<DeviceRoom>(mine.device, num_seats(mine.num_multiprocessors));
    mine.free_seats = room_->num_free();
  });
  return exchange.all_gather(mine);
}

void DeviceGroup::read_facts(const std::vector<Place>& places) {
  facts_.world_size = static_cast<int>(places.size());
  facts_.min_multiprocessors = places[0].num_multiprocessors;
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    const Place& place = places[rank];
    places_.push_back({place.device, place.bootstrap_address.str(), place.pid,
                       num_seats(place.num_multiprocessors)});
    if (place.host_id.str() != places[0].host_id.str())
      throw Unavailable("rank 0 and rank " + std::to_string(rank) + " are on different hosts");
    facts_.min_multiprocessors = std::min(facts_.min_multiprocessors, place.num_multiprocessors);
    int sharing = 0;
    for (const Place& other : places) {
      if (std::memcmp(&place.device, &other.device, sizeof place.device) != 0) continue;
      ++sharing;
      // Processes whose contexts the driver gives the GPU in turns.
      if (other.pid != place.pid && !(place.has_mps && other.has_mps)) facts_.takes_turns = true;
    }
    facts_.max_ranks_per_device = std::max(facts_.max_ranks_per_device, sharing);
    facts_.free_seats = std::min(facts_.free_seats, place.free_seats);
  }
  facts_.is_on_one_device = facts_.max_ranks_per_device == facts_.world_size;
  if (facts_.takes_turns) why_turns_ = kNoMps;
}

// Another group may take seats after this rank has counted them. All ranks then try again with half
// as many. Without any seats, no kernel of the group ever waits.
void DeviceGroup::take_seats(RecordExchange& exchange) {
  while (!facts_.takes_turns) {
    const unsigned num_blocks = blocks_that_fit(facts_);
    if (num_blocks == 0) {
      facts_.takes_turns = true;
      why_turns_ = kNoRoom;
      return;
    }
    bool is_seated = true;
    agree(exchange, attempt([&] {
            if (takes_seats(facts_, exchange.rank()))
              is_seated = room_->take(static_cast<int>(num_blocks));
          }));
    const std::vector<std::uint8_t> are_seated = exchange.all_gather(std::uint8_t{is_seated});
    if (std::find(are_seated.begin(), are_seated.end(), 0) == are_seated.end()) return;
    agree(exchange, attempt([&] { room_->give_all_back(); }));  // before any looks for others
    facts_.free_seats = std::min(facts_.free_seats, room_->num_seats()) / 2;
  }
}

// Rounded up to whole lines, so that the memory behind is aligned.
std::size_t DeviceGroup::own_host_bytes() const {
  return Leaving::num_bytes(world_size()) +
         num_slices(MailRoom::num_bytes(world_size()), kLineBytes) * kLineBytes;
}

void DeviceGroup::share_staging(RecordExchange& exchange) {
  segment_ = std::make_unique<Segment>(exchange, device_, places_, kind_,
                                       staging_.layout.num_bytes(), *leaving_, *word_);
  for (int rank = 0; rank < exchange.world_size(); ++rank) staging_.of[rank] = segment_->of(rank);
}

// Rank 0 makes it; each rank has a control block of its own besides.
void DeviceGroup::share_host_memory(RecordExchange& exchange, std::size_t num_bytes) {
  shm::Bootstrap& bootstrap = shm::Bootstrap::instance();
  struct Offer {
    RecordText<160> key;
    Text problem;
  } mine;
  mine.problem = attempt([&] {
    control_ = std::make_unique<MappedHostMemory>(device_, sizeof(Control));
    new (control_->host()) Control;
    word_ = std::make_unique<MappedHostMemory>(device_, sizeof(std::uint64_t));
    if (exchange.rank() != 0) return;
    const std::string key = new_offer_key();
    shm::UniqueFd fd = shm::create_memfd(num_bytes, "ringcomm-cuda");
    host_memory_ = shm::SharedMemory(fd.get(), num_bytes);
    bootstrap.offer(key, std::move(fd));
    mine.key = RecordText<160>(key);
  });
  const std::vector<Offer> offers = exchange.all_gather(mine);
  const std::string key = offers[0].key.str();
  Text problem = mine.problem;
  if (problem.str().empty() && exchange.rank() != 0)
    problem = attempt([&] {
      const shm::UniqueFd fd = fetch_from(places_[0], 0, key);
      shm::check_sealed(fd.get());
      host_memory_ = shm::SharedMemory(fd.get(), num_bytes);
    });
  const std::vector<Text> problems = exchange.all_gather(problem);
  if (exchange.rank() == 0 && !key.empty()) bootstrap.withdraw(key);
  check_problems(problems);
}

}  // namespace ringcomm::cuda

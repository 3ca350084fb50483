#include "cuda/collectives/device_group.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <new>
#include <optional>
#include <thread>
#include <utility>

#include "core/chunk_layout.h"
#include "core/errors.h"
#include "cuda/collectives/kernels.h"
#include "transport/peer_table.h"

namespace ringcomm::cuda {
namespace {

using Text = RecordText<256>;

int attribute_of(DeviceOrdinal device, DeviceAttribute attribute) {
  int value = 0;
  check(driver().device_get_attribute(&value, attribute, device), "ask the GPU for its attributes");
  return value;
}

// Of a pair of ranks; the blocks are added to the last.
constexpr std::uint32_t kUndecided = 0, kDeciding = 1, kDecided = 2;
constexpr std::chrono::microseconds kPoll{20};

bool reserve_in_all(const std::vector<std::unique_ptr<BlockReservation>>& reservations,
                    unsigned num_blocks) {
  for (const auto& reservation : reservations) {
    if (reservation->reserve(static_cast<int>(num_blocks))) continue;
    for (const auto& taken : reservations) taken->release_all();
    return false;
  }
  return true;
}

constexpr const char* kNoMps = "start MPS (nvidia-cuda-mps-control -d) before the ranks";
constexpr const char* kNoRoom =
    "other groups use all of the GPU's room for kernels that wait for other ranks: destroy groups "
    "that are no longer used, or use this one first";

}  // namespace

unsigned MessageBlocks::with(int peer, const std::function<void()>& look) {
  const auto [lower, higher] = std::minmax(rank_, peer);
  std::atomic<std::uint32_t>& word = words_.pair_blocks[lower][higher];
  std::uint32_t seen = kUndecided;
  if (word.compare_exchange_strong(seen, kDeciding)) {
    unsigned num_blocks = 0;
    try {
      num_blocks = reserve(peer);
    } catch (...) {
      word = kDecided;
      throw;
    }
    word = kDecided + num_blocks;
    return num_blocks;
  }
  for (; seen == kDeciding; seen = word) {
    look();
    std::this_thread::sleep_for(kPoll);
  }
  return seen - kDecided;
}

unsigned MessageBlocks::reserve(int peer) {
  const RankPlace& own = places_[static_cast<std::size_t>(rank_)];
  const RankPlace& theirs = places_[static_cast<std::size_t>(peer)];
  std::vector<std::unique_ptr<BlockReservation>> reservations;
  reservations.push_back(std::make_unique<BlockReservation>(own.device, own.max_waiting_blocks));
  if (std::memcmp(&own.device, &theirs.device, sizeof own.device) != 0)
    reservations.push_back(
        std::make_unique<BlockReservation>(theirs.device, theirs.max_waiting_blocks));
  int num_free = own.max_waiting_blocks;
  for (const auto& reservation : reservations)
    num_free = std::min(num_free, reservation->num_free());
  // Free places may be held for a moment by another rank's attempt to reserve more.
  for (unsigned num_blocks = std::max(1u, blocks_per_lane_that_fit(layout_, num_free));
       num_blocks > 0; num_blocks /= 2) {
    if (!reserve_in_all(reservations, 2 * num_blocks)) continue;
    for (auto& reservation : reservations) reservations_.push_back(std::move(reservation));
    return num_blocks;
  }
  return 0;
}

struct DeviceGroup::Place {
  DeviceUuid device = {};
  RecordText<64> host_id;
  RecordText<112> bootstrap_address;
  std::int64_t pid = 0;
  int num_multiprocessors = 0;
  bool has_mps = false;
  bool has_fds = false;
  int free_blocks = 0;
  Text problem;
};

DeviceGroup::DeviceGroup(RecordExchange& exchange, DeviceOrdinal device) : device_(device) {
  if (exchange.world_size() > kMaxRanks)
    throw Unavailable("a group of " + std::to_string(exchange.world_size()) +
                      " ranks is larger than " + std::to_string(kMaxRanks));
  const std::vector<Place> places = find_places(exchange);
  check_problems(places);
  read_facts(places);
  reserve_blocks(exchange);
  staging_.layout = make_staging_layout(facts_);
  const bool have_fds =
      std::all_of(places.begin(), places.end(), [](const Place& place) { return place.has_fds; });
  kind_ = have_fds ? HandleKind::kFd : HandleKind::kIpc;
  share_host_memory(exchange);
  exports_ = std::make_unique<Exports>(words(), exchange.rank(), places_);
  message_blocks_ =
      std::make_unique<MessageBlocks>(words(), exchange.rank(), places_, staging_.layout);
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
    reservation_ = std::make_unique<BlockReservation>(mine.device,
                                                      max_waiting_blocks(mine.num_multiprocessors));
    mine.free_blocks = reservation_->num_free();
  });
  return exchange.all_gather(mine);
}

void DeviceGroup::read_facts(const std::vector<Place>& places) {
  facts_.world_size = static_cast<int>(places.size());
  facts_.min_multiprocessors = places[0].num_multiprocessors;
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    const Place& place = places[rank];
    places_.push_back({place.device, place.bootstrap_address.str(), place.pid,
                       max_waiting_blocks(place.num_multiprocessors)});
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
    facts_.free_blocks = std::min(facts_.free_blocks, place.free_blocks);
  }
  facts_.is_on_one_device = facts_.max_ranks_per_device == facts_.world_size;
  if (facts_.takes_turns) why_turns_ = kNoMps;
}

// Another group may reserve blocks after this rank has counted them. All ranks then try again with
// half as many. Without any, no kernel of the group ever waits.
void DeviceGroup::reserve_blocks(RecordExchange& exchange) {
  while (!facts_.takes_turns) {
    const unsigned num_blocks = blocks_that_fit(facts_);
    if (num_blocks == 0) {
      facts_.takes_turns = true;
      why_turns_ = kNoRoom;
      return;
    }
    bool has_reserved = true;
    agree(exchange, attempt([&] {
            if (cuda::reserves_blocks(facts_, exchange.rank()))
              has_reserved = reservation_->reserve(static_cast<int>(num_blocks));
          }));
    const std::vector<std::uint8_t> all = exchange.all_gather(std::uint8_t{has_reserved});
    if (std::find(all.begin(), all.end(), 0) == all.end()) return;
    agree(exchange, attempt([&] { reservation_->release_all(); }));  // before any looks for others
    facts_.free_blocks = std::min(facts_.free_blocks, reservation_->capacity()) / 2;
  }
}

void DeviceGroup::share_staging(RecordExchange& exchange) {
  segment_ = std::make_unique<Segment>(exchange, device_, places_, kind_,
                                       staging_.layout.num_bytes(), *exports_, *word_);
  for (int rank = 0; rank < exchange.world_size(); ++rank) staging_.of[rank] = segment_->of(rank);
}

// Rank 0 makes it; each rank has a control block of its own besides.
void DeviceGroup::share_host_memory(RecordExchange& exchange) {
  std::optional<Offer> offer;
  struct Record {
    RecordText<160> key;
    Text problem;
  } mine;
  mine.problem = attempt([&] {
    control_ = std::make_unique<MappedHostMemory>(device_, sizeof(Control));
    new (control_->host()) Control;
    word_ = std::make_unique<MappedHostMemory>(device_, sizeof(std::uint64_t));
    if (exchange.rank() != 0) return;
    shm::UniqueFd fd = shm::create_memfd(sizeof(GroupWords), "ringcomm-cuda");
    host_memory_ = shm::SharedMemory(fd.get(), sizeof(GroupWords));
    mine.key = RecordText<160>(offer.emplace(std::move(fd)).key());
  });
  const std::string key = exchange.all_gather(mine)[0].key.str();
  if (mine.problem.str().empty() && exchange.rank() != 0)
    mine.problem = attempt([&] {
      const shm::UniqueFd fd = Offer::fetch(places_[0], 0, key);
      shm::check_sealed(fd.get());
      host_memory_ = shm::SharedMemory(fd.get(), sizeof(GroupWords));
    });
  agree(exchange, mine.problem);  // all have it, before it is offered no longer
}

}  // namespace ringcomm::cuda

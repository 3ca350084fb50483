#include "cuda/collectives/device_group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/errors.h"
#include "cuda/collectives/device_transport.h"
#include "cuda/collectives/events.h"
#include "cuda/collectives/kernels.h"
#include "host/bootstrap.h"
#include "host/fd.h"
#include "host/process.h"
#include "host/rank_record.h"

namespace ringcomm::cuda {
namespace {

constexpr std::chrono::milliseconds kFetchTimeout{10'000};

// The signature that every rank writes into its own part and checks in the others'.
std::uint64_t signature(int rank) { return 0x52494e47434f4d4dU + static_cast<unsigned>(rank); }

// Bits of this process, other ones after a fork: processes of two containers may have equal pids.
std::uint64_t process_identity() {
  struct Identity {
    std::uint64_t number = host::random_number();
  };
  static constinit PerProcess<Identity> identity;
  return identity.get().number;
}

// A file descriptor that other ranks' processes can fetch while this object lives.
class Offer {
 public:
  explicit Offer(host::UniqueFd fd) { host::Bootstrap::instance().offer(key_, std::move(fd)); }
  ~Offer() { host::Bootstrap::instance().withdraw(key_); }
  Offer(const Offer&) = delete;
  Offer& operator=(const Offer&) = delete;

  const std::string& key() const { return key_; }
  // Fetches what a rank's process offers.
  static host::UniqueFd fetch(const RankPlace& place, int rank, const std::string& key) {
    host::UniqueFd fd =
        host::Bootstrap::instance().fetch(place.bootstrap_address.str(), key, kFetchTimeout);
    if (!fd)
      throw Error({.kind = ErrorKind::kSystem, .rank = rank},
                  "ringcomm: rank " + std::to_string(rank) + " did not send its memory descriptor");
    return fd;
  }

 private:
  const std::string key_ = host::random_text();
};

int attribute_of(DeviceOrdinal device, DeviceAttribute attribute) {
  int value = 0;
  check(driver().device_get_attribute(&value, attribute, device), "ask the GPU for its attributes");
  return value;
}

// Of a pair of ranks; the places are added to the last.
constexpr std::uint32_t kUndecided = 0, kDeciding = 1, kDecided = 2;
constexpr std::chrono::microseconds kPoll{20};

bool reserve_in_all(const std::vector<std::unique_ptr<BlockReservation>>& reservations,
                    unsigned num_places) {
  for (const auto& reservation : reservations) {
    if (reservation->reserve(static_cast<int>(num_places))) continue;
    for (const auto& taken : reservations) taken->release_all();
    return false;
  }
  return true;
}

constexpr const char* kNoMps = "start MPS (nvidia-cuda-mps-control -d) before the ranks";
constexpr const char* kNoRoom =
    "other groups use all of the GPU's room for kernels that wait for other ranks: destroy groups "
    "that are no longer used, or use this one first";

// A rank's record of its part of a segment.
struct Part {
  RecordText<160> offer_key;
  std::uint64_t num_bytes = 0;
  RecordText<256> problem;
};

// Maps a peer's part, and throws where it has not the peer's signature.
std::unique_ptr<DeviceMemory> map_part(DeviceOrdinal device, int peer, const RankPlace& place,
                                       const Part& part, MappedHostMemory& word) {
  auto memory = std::make_unique<DeviceMemory>(device, part.num_bytes,
                                               Offer::fetch(place, peer, part.offer_key.str()));
  copy_and_wait(word.device(), memory->data(), sizeof(std::uint64_t), "read another rank's memory");
  std::uint64_t value = 0;
  std::memcpy(&value, word.host(), sizeof value);
  if (value != signature(peer))
    throw Error({.kind = ErrorKind::kSystem, .rank = peer},
                "ringcomm: the memory that rank " + std::to_string(peer) +
                    " handed over is not the memory that it has written to");
  return memory;
}

}  // namespace

Segment::Segment(RecordExchange& exchange, DeviceOrdinal device,
                 const std::vector<RankPlace>& places, std::size_t num_bytes,
                 MappedHostMemory& word)
    : parts_(places.size()) {
  std::optional<Offer> offer;  // until all have mapped it
  auto& own = parts_[static_cast<std::size_t>(exchange.rank())];
  Part mine;
  mine.problem = attempt([&] {
    own = std::make_unique<DeviceMemory>(device, num_bytes);
    mine.num_bytes = own->num_bytes();
    const std::uint64_t value = signature(exchange.rank());
    std::memcpy(word.host(), &value, sizeof value);
    copy_and_wait(own->data(), word.device(), sizeof value, "write to memory of the GPU");
    mine.offer_key = RecordText<160>(offer.emplace(own->export_fd()).key());
  });
  const std::vector<Part> all = exchange.all_gather(mine);
  check_problems(all);
  agree(exchange, attempt([&] {
          for (int peer = 0; peer < exchange.world_size(); ++peer) {
            const auto idx = static_cast<std::size_t>(peer);
            if (peer != exchange.rank())
              parts_[idx] = map_part(device, peer, places[idx], all[idx], word);
          }
        }));
  // Zeroed, including the signatures, before any rank uses it.
  agree(exchange, attempt([&] {
          copy_and_wait(own->data(), nullptr, own->num_bytes(), "clear memory of the GPU");
        }));
}

DeviceGroup::DeviceGroup(RecordExchange& exchange, DeviceOrdinal device)
    : exchange_(exchange), device_(device) {
  if (exchange.world_size() > kMaxRanks)
    throw Unavailable("a group of " + std::to_string(exchange.world_size()) +
                      " ranks is larger than " + std::to_string(kMaxRanks));
  find_places();
  check_problems(places_);
  read_facts();
  reserve_places();
  staging_.layout = make_staging_layout(facts_);
  share_host_memory();
  segment_ = std::make_unique<Segment>(exchange_, device_, places_, staging_.layout.num_bytes(),
                                       *words_for_copies_);
  for (int rank = 0; rank < exchange.world_size(); ++rank) staging_.of[rank] = segment_->of(rank);
  description_ = describe();
}

std::string DeviceGroup::describe() const {
  const bool has_mps = places_[static_cast<std::size_t>(exchange_.rank())].has_mps;
  const bool has_few_queues = has_mps && std::getenv("CUDA_DEVICE_MAX_CONNECTIONS") == nullptr;
  char megabytes[32];
  std::snprintf(megabytes, sizeof megabytes, "%.1f",
                static_cast<double>(staging_.layout.num_bytes()) / (1 << 20));
  return "cuda_ipc by file descriptors: " + std::to_string(facts_.max_ranks_per_device) +
         " ranks on a GPU" +
         (facts_.takes_turns
              ? (why_turns_ == kNoMps ? ", taking turns (no MPS)" : ", taking turns (no room)")
          : facts_.max_ranks_per_device > 1 ? ", side by side"
                                            : "") +
         ", " + std::to_string(staging_.layout.num_blocks) + " blocks" +
         (reservation_->is_shared() ? "" : " (not counted with other groups': no file locks)") +
         ", " + megabytes + " MiB of staging each" +
         (has_few_queues ? std::string(", ") + kFewQueues : "");
}

void DeviceGroup::find_places() {
  RankPlace mine;
  mine.host_id = RecordText<64>(host_id());
  mine.process = process_identity();
  mine.problem = attempt([&] {
    mine.bootstrap_address = RecordText<112>(host::Bootstrap::instance().address());
    check(driver().device_get_uuid(&mine.device, device_), "ask the GPU for its name");
    mine.num_multiprocessors = attribute_of(device_, kMultiprocessorCount);
    mine.has_mps = attribute_of(device_, kMpsEnabled) != 0;
    const char* maps = std::getenv("RINGCOMM_MAP_TENSORS");
    mine.maps_tensors = maps == nullptr || std::strcmp(maps, "0") != 0;
    if (attribute_of(device_, kVirtualMemoryManagementSupported) == 0 ||
        attribute_of(device_, kHandleTypePosixFdSupported) == 0)
      throw std::runtime_error("the GPU does not share memory by file descriptors");
    Kernels::of(device_);  // a device that cannot run them is found out before any memory is shared
    reservation_ = std::make_unique<BlockReservation>(mine.device,
                                                      max_waiting_places(mine.num_multiprocessors));
    mine.free_places = reservation_->num_free();
  });
  places_ = exchange_.all_gather(mine);
}

void DeviceGroup::read_facts() {
  facts_.world_size = exchange_.world_size();
  facts_.min_multiprocessors = places_[0].num_multiprocessors;
  for (std::size_t rank = 0; rank < places_.size(); ++rank) {
    const RankPlace& place = places_[rank];
    if (place.host_id.str() != places_[0].host_id.str())
      throw Unavailable("rank 0 and rank " + std::to_string(rank) + " are on different hosts");
    facts_.min_multiprocessors = std::min(facts_.min_multiprocessors, place.num_multiprocessors);
    maps_tensors_ = maps_tensors_ && place.maps_tensors;
    int sharing = 0;
    for (const RankPlace& other : places_) {
      if (other.device != place.device) continue;
      ++sharing;
      // Processes whose contexts the driver gives the GPU in turns.
      if (other.process != place.process && !(place.has_mps && other.has_mps))
        facts_.takes_turns = true;
    }
    facts_.max_ranks_per_device = std::max(facts_.max_ranks_per_device, sharing);
    facts_.free_places = std::min(facts_.free_places, place.free_places);
  }
  if (facts_.takes_turns) why_turns_ = kNoMps;
}

// Another group may reserve places after this rank has counted them. All ranks then try again with
// half as many. Without any, no kernel of the group ever waits.
void DeviceGroup::reserve_places() {
  while (!facts_.takes_turns) {
    const unsigned num_places = places_that_fit(facts_);
    if (num_places == 0) {
      facts_.takes_turns = true;
      why_turns_ = kNoRoom;
      return;
    }
    bool has_reserved = true;
    agree(exchange_, attempt([&] {
            if (cuda::reserves_places(facts_, exchange_.rank()))
              has_reserved = reservation_->reserve(static_cast<int>(num_places));
          }));
    const std::vector<std::uint8_t> all = exchange_.all_gather(std::uint8_t{has_reserved});
    if (std::find(all.begin(), all.end(), 0) == all.end()) return;
    agree(exchange_, attempt([&] { reservation_->release_all(); }));  // before any looks for others
    facts_.free_places = std::min(facts_.free_places, reservation_->capacity()) / 2;
  }
}

// Rank 0 makes it; each rank has a control block of its own besides.
void DeviceGroup::share_host_memory() {
  std::optional<Offer> offer;
  struct Record {
    RecordText<160> key;
    RecordText<256> problem;
  } mine;
  mine.problem = attempt([&] {
    control_ = std::make_unique<MappedHostMemory>(device_, sizeof(Control));
    new (control_->host()) Control;
    words_for_copies_ =
        std::make_unique<MappedHostMemory>(device_, kMaxRanks * sizeof(std::uint64_t));
    if (exchange_.rank() != 0) return;
    host::UniqueFd fd = host::create_memfd(sizeof(GroupWords), "ringcomm-cuda");
    host_memory_ = host::SharedMemory(fd.get(), sizeof(GroupWords));
    mine.key = RecordText<160>(offer.emplace(std::move(fd)).key());
  });
  const std::string key = exchange_.all_gather(mine)[0].key.str();
  if (mine.problem.str().empty() && exchange_.rank() != 0)
    mine.problem = attempt([&] {
      const host::UniqueFd fd = Offer::fetch(places_[0], 0, key);
      host_memory_ = host::SharedMemory::of_peer(fd.get());
    });
  agree(exchange_, mine.problem);  // all have it, before it is offered no longer
}

unsigned DeviceGroup::places_of_messages(int peer, const LookAtPeer& look) {
  const auto [lower, higher] = std::minmax({exchange_.rank(), peer});
  std::atomic<std::uint32_t>& word = words().pair_places[lower][higher];
  std::uint32_t seen = kUndecided;
  if (word.compare_exchange_strong(seen, kDeciding)) {
    unsigned num_places = 0;
    try {
      num_places = reserve_for_messages(peer);
    } catch (...) {
      word = kDecided;
      throw;
    }
    word = kDecided + num_places;
    return num_places;
  }
  for (; seen == kDeciding; seen = word) {
    look([&] { return word != kDeciding; });
    std::this_thread::sleep_for(kPoll);
  }
  return seen - kDecided;
}

unsigned DeviceGroup::reserve_for_messages(int peer) {
  const RankPlace& own = places_[static_cast<std::size_t>(exchange_.rank())];
  const RankPlace& theirs = places_[static_cast<std::size_t>(peer)];
  std::vector<std::unique_ptr<BlockReservation>> reservations;
  int num_free = std::numeric_limits<int>::max();
  for (const RankPlace* place : {&own, &theirs}) {
    if (place == &theirs && theirs.device == own.device) break;
    reservations.push_back(std::make_unique<BlockReservation>(
        place->device, max_waiting_places(place->num_multiprocessors)));
    num_free = std::min(num_free, reservations.back()->num_free());
  }
  // Free places may be held for a moment by another rank's attempt to reserve more.
  for (unsigned num_places = std::max(1u, places_per_lane_that_fit(staging_.layout, num_free));
       num_places > 0; num_places /= 2) {
    if (!reserve_in_all(reservations, 2 * num_places)) continue;
    std::ranges::move(reservations, std::back_inserter(message_reservations_));
    return num_places;
  }
  return 0;
}

}  // namespace ringcomm::cuda

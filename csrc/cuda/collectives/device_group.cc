#include "cuda/collectives/device_group.h"

#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>

#include "core/errors.h"
#include "cuda/collectives/device_transport.h"
#include "cuda/collectives/events.h"
#include "cuda/collectives/launches.h"
#include "host/fd.h"
#include "host/rank_record.h"

namespace ringcomm::cuda {
namespace {

// The signature that every rank writes into its own part and checks in the others'.
std::uint64_t signature(int rank) { return 0x52494e47434f4d4dU + static_cast<unsigned>(rank); }

int attribute_of(DeviceOrdinal device, DeviceAttribute attribute) {
  int value = 0;
  check(driver().device_get_attribute(&value, attribute, device), "ask the GPU for its attributes");
  return value;
}

// A rank's record of memory that it offers.
struct Offered {
  RecordText<160> key;
  std::uint64_t num_bytes = 0;
  RecordText<256> problem;
};

// In front of a part's scratch memory, until that is cleared: its owner's signature for a rank,
// which the rank clears when it has read it.
std::byte* word_for(int rank, const DeviceMemory& part) {
  return part.data() + static_cast<std::size_t>(rank) * sizeof(std::uint64_t);
}

// Maps a peer's part, and throws where it has not the peer's signature.
std::unique_ptr<DeviceMemory> map_part(const DeviceGroup& group, int rank, int peer,
                                       const Offered& part) {
  auto memory = std::make_unique<DeviceMemory>(
      group.device(), part.num_bytes,
      host::Offer::fetch(group.place(peer).bootstrap_address.str(), peer, part.key.str()));
  copy_and_wait(&group.control_on_device()->copied, word_for(rank, *memory), sizeof(std::uint64_t),
                "read another rank's memory");
  if (group.control().copied != signature(peer))
    throw Error({.kind = ErrorKind::kSystem, .rank = peer},
                "ringcomm: the memory that rank " + std::to_string(peer) +
                    " handed over is not the memory that it has written to");
  copy_and_wait(word_for(rank, *memory), nullptr, sizeof(std::uint64_t),
                "write to another rank's memory");
  return memory;
}

}  // namespace

DeviceGroup::DeviceGroup(RecordExchange& exchange, DeviceOrdinal device)
    : exchange_(exchange), device_(device) {
  if (exchange.world_size() > kMaxRanks)
    throw Unavailable("a group of " + std::to_string(exchange.world_size()) +
                      " ranks is larger than " + std::to_string(kMaxRanks));
  find_places();
  check_problems(places_);
  read_facts();
  staging_.layout = make_staging_layout(facts_);
  waiting_blocks_ = WaitingBlocks::of(device_).take(static_cast<int>(staging_.layout.num_blocks));
  share_host_memory();
  share_staging();
  description_ = describe();
}

std::string DeviceGroup::describe() const {
  const bool has_mps = places_[static_cast<std::size_t>(exchange_.rank())].has_mps;
  const bool has_few_queues = has_mps && std::getenv("CUDA_DEVICE_MAX_CONNECTIONS") == nullptr;
  return "cuda_ipc by file descriptors: " + std::to_string(facts_.max_ranks_per_device) +
         " ranks on a GPU, " + std::to_string(staging_.layout.num_blocks) + " blocks that wait, " +
         std::to_string(staging_.layout.num_bytes() >> 20) + " MiB of staging each" +
         (facts_.has_switches ? ", switches that add" : "") +
         (has_few_queues ? std::string(", ") + kFewQueues : "");
}

void DeviceGroup::find_places() {
  RankPlace mine;
  mine.host_id = RecordText<64>(host_id());
  mine.problem = attempt([&] {
    const std::string& address = host::Bootstrap::instance().address();
    mine.bootstrap_address = RecordText<112>(address);
    mine.process = std::hash<std::string>{}(address);
    check(driver().device_get_uuid(&mine.device, device_), "ask the GPU for its name");
    mine.num_multiprocessors = attribute_of(device_, kMultiprocessorCount);
    mine.has_mps = attribute_of(device_, kMpsEnabled) != 0;
    mine.has_multicast = attribute_of(device_, kMulticastSupported) != 0;
    const char* maps = std::getenv("RINGCOMM_MAP_TENSORS");
    mine.maps_tensors = maps == nullptr || std::strcmp(maps, "0") != 0;
    if (attribute_of(device_, kVirtualMemoryManagementSupported) == 0 ||
        attribute_of(device_, kHandleTypePosixFdSupported) == 0)
      throw std::runtime_error("the GPU does not share memory by file descriptors");
    Kernels::of(device_);  // a device that cannot run them is found out before any memory is shared
    std::size_t free_bytes = 0, all_bytes = 0;
    check(driver().mem_get_info(&free_bytes, &all_bytes), "ask the GPU for its free memory");
    mine.free_bytes = free_bytes;
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
      // The driver gives the GPU to processes in turns, so a kernel that waits for another's may
      // never see it run.
      if (other.process != place.process && !(place.has_mps && other.has_mps))
        throw Unavailable(
            "processes that share a GPU need MPS: start it (nvidia-cuda-mps-control -d) before the "
            "ranks");
    }
    facts_.max_ranks_per_device = std::max(facts_.max_ranks_per_device, sharing);
    facts_.free_bytes = std::min(facts_.free_bytes, place.free_bytes);
  }
  // Three ranks send as many bytes through a switch that adds as to each other.
  facts_.has_switches = facts_.world_size > 3 && facts_.max_ranks_per_device == 1 &&
                        std::ranges::all_of(places_, &RankPlace::has_multicast);
  // All ranks take as many blocks as the one that has the fewest left.
  const int share =
      share_of_waiting_blocks(facts_.min_multiprocessors, facts_.max_ranks_per_device);
  for (const int left : exchange_.all_gather(WaitingBlocks::of(device_).left(share)))
    facts_.free_blocks = std::min(facts_.free_blocks, left);
  if (facts_.free_blocks < -share)
    throw Unavailable(
        "other groups use all of the GPU's room for kernels that wait for other ranks: destroy "
        "groups that are no longer used, or use this one first");
}

// Rank 0 makes it; each rank has a control block of its own besides.
void DeviceGroup::share_host_memory() {
  std::optional<host::Offer> offer;
  Offered mine;
  mine.problem = attempt([&] {
    control_ = std::make_unique<MappedHostMemory>(device_, sizeof(Control));
    new (control_->host()) Control;
    if (exchange_.rank() != 0) return;
    host::UniqueFd fd = host::create_memfd(sizeof(GroupWords), "ringcomm-cuda");
    host_memory_ = host::SharedMemory(fd.get(), sizeof(GroupWords));
    mine.key = RecordText<160>(offer.emplace(std::move(fd)).key());
  });
  const std::string key = exchange_.all_gather(mine)[0].key.str();
  if (mine.problem.str().empty() && exchange_.rank() != 0)
    mine.problem = attempt([&] {
      const host::UniqueFd fd = host::Offer::fetch(places_[0].bootstrap_address.str(), 0, key);
      host_memory_ = host::SharedMemory::of_peer(fd.get());
    });
  agree(exchange_, mine.problem);  // all have it, before it is offered no longer
}

// The address is of each rank's part; what is in front of the scratch memory is zeroed.
void DeviceGroup::share_staging() {
  std::optional<host::Offer> offer;  // until all have mapped it
  parts_.resize(places_.size());
  auto& own = parts_[static_cast<std::size_t>(exchange_.rank())];
  Offered mine;
  mine.problem = attempt([&] {
    own = std::make_unique<DeviceMemory>(device_, staging_.layout.num_bytes());
    mine.num_bytes = own->num_bytes();
    control().copied = signature(exchange_.rank());
    for (int rank = 0; rank < exchange_.world_size(); ++rank)
      copy_and_wait(word_for(rank, *own), &control_on_device()->copied, sizeof control().copied,
                    "write to memory of the GPU");
    mine.key = RecordText<160>(offer.emplace(own->export_fd()).key());
  });
  const std::vector<Offered> all = exchange_.all_gather(mine);
  check_problems(all);
  agree(exchange_, attempt([&] {
          for (std::size_t idx = 0; idx < parts_.size(); ++idx) {
            const int rank = static_cast<int>(idx);
            if (rank != exchange_.rank())
              parts_[idx] = map_part(*this, exchange_.rank(), rank, all[idx]);
            staging_.of[rank] = parts_[idx]->data();
          }
        }));
  // Before any rank uses it. Some machines lose what one GPU writes to the memory of another.
  agree(exchange_, attempt([&] {
          for (int rank = 0; rank < exchange_.world_size(); ++rank) {
            if (rank == exchange_.rank()) continue;
            copy_and_wait(&control_on_device()->copied, word_for(rank, *own),
                          sizeof control().copied, "read memory of the GPU");
            if (control().copied != 0)
              throw Unavailable("what rank " + std::to_string(rank) +
                                " writes to this rank's GPU does not arrive");
          }
          copy_and_wait(own->data(), nullptr, staging_.layout.scratch_offset(),
                        "clear memory of the GPU");
        }));
}

}  // namespace ringcomm::cuda

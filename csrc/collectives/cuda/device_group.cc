#include "collectives/cuda/device_group.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <new>

#include "collectives/cuda/events.h"
#include "collectives/cuda/kernels.h"
#include "collectives/cuda/unavailable.h"
#include "core/errors.h"
#include "transport/shm/process_hub.h"
#include "transport/shm/rank_record.h"

namespace ringcomm::cuda {
namespace {

using Text = RecordText<256>;

constexpr std::chrono::milliseconds kFetchTimeout{10'000};
// Of all kernels this takes the most registers.
constexpr const char* kLargestKernel = "ringcomm_two_shot_bfloat16";

template <class Record>
void check_all(const std::vector<Record>& records) {
  for (std::size_t rank = 0; rank < records.size(); ++rank)
    if (const std::string problem = records[rank].problem.str(); !problem.empty())
      throw Unavailable("rank " + std::to_string(rank) + ": " + problem);
}

struct Verdict {
  Text problem;
};

int attribute_of(DeviceOrdinal device, DeviceAttribute attribute) {
  int value = 0;
  check(driver().device_get_attribute(&value, attribute, device), "ask the GPU for its attributes");
  return value;
}

// What every rank writes into its own staging, and finds in the others'.
std::uint64_t signature(int rank) { return 0x52494e47434f4d4dU + static_cast<unsigned>(rank); }

}  // namespace

struct DeviceGroup::Place {
  DeviceUuid device = {};
  RecordText<64> host_id;
  RecordText<112> hub_address;
  std::int64_t pid = 0;
  int num_multiprocessors = 0;
  int blocks_per_multiprocessor = 0;
  bool has_mps = false;
  bool has_fds = false;
  Text problem;
};

struct DeviceGroup::Memory {
  RecordText<160> offer_key;
  RecordText<160> host_offer_key;
  IpcMemHandle handle = {};
  std::byte* address = nullptr;
  Text problem;
};

DeviceGroup::DeviceGroup(RecordExchange& exchange, DeviceOrdinal device, std::size_t host_bytes)
    : device_(device) {
  if (exchange.world_size() > kMaxRanks)
    throw Unavailable("a group of " + std::to_string(exchange.world_size()) +
                      " ranks is larger than " + std::to_string(kMaxRanks));
  const std::vector<Place> places = find_places(exchange);
  check_all(places);
  read_facts(places);
  staging_.layout = make_staging_layout(facts_);
  const bool have_fds =
      std::all_of(places.begin(), places.end(), [](const Place& place) { return place.has_fds; });
  HandleKind kind = have_fds ? HandleKind::kFd : HandleKind::kIpc;
  try {
    share(exchange, places, kind, host_bytes);
  } catch (const Unavailable&) {
    if (kind == HandleKind::kIpc) throw;
    // All ranks are here with the same reason, and none has a part of the others' memory.
    kind = HandleKind::kIpc;
    share(exchange, places, kind, host_bytes);
  }
  char megabytes[32];
  std::snprintf(megabytes, sizeof megabytes, "%.1f",
                static_cast<double>(staging_.layout.num_bytes()) / (1 << 20));
  description_ = std::string("cuda_ipc by ") + name_of(kind) + ": " +
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
  }
  if (facts_.min_multiprocessors * facts_.blocks_per_multiprocessor < facts_.max_ranks_per_device &&
      !facts_.takes_turns)
    throw Unavailable("a GPU has no room for a block of each of its " +
                      std::to_string(facts_.max_ranks_per_device) + " ranks");
}

void DeviceGroup::share(RecordExchange& exchange, const std::vector<Place>& places, HandleKind kind,
                        std::size_t host_bytes) {
  const Memory mine = make_memory(exchange, kind, host_bytes);
  const std::vector<Memory> memories = exchange.all_gather(mine);
  const auto take_back = [&] {
    for (const std::string* key : {&offer_key_, &host_offer_key_})
      if (!key->empty()) shm::ProcessHub::instance().withdraw(*key);
  };
  try {
    check_all(memories);
    Verdict verdict;
    verdict.problem = attempt([&] {
      mapped_.clear();
      mapped_.resize(memories.size());
      for (int peer = 0; peer < exchange.world_size(); ++peer) {
        const auto idx = static_cast<std::size_t>(peer);
        if (peer != exchange.rank()) map_peer(peer, places[idx], memories[idx], host_bytes);
      }
    });
    check_all(exchange.all_gather(verdict));
  } catch (...) {
    take_back();
    mapped_.clear();
    throw;
  }
  take_back();
}

DeviceGroup::Memory DeviceGroup::make_memory(RecordExchange& exchange, HandleKind kind,
                                             std::size_t host_bytes) {
  static std::atomic<int> num_offers = 0;
  Memory mine;
  mine.problem = attempt([&] {
    shm::ProcessHub& hub = shm::ProcessHub::instance();
    const std::string key = hub.address() + "/cuda/" + std::to_string(num_offers++);
    own_ = std::make_unique<DeviceMemory>(device_, staging_.layout.num_bytes(), kind);
    control_ = std::make_unique<MappedHostMemory>(device_, sizeof(Control));
    new (control_->host()) Control;
    staging_.of[exchange.rank()] = own_->data();
    clear_staging(exchange.rank());
    mine.address = own_->data();
    if (kind == HandleKind::kFd) {
      offer_key_ = key;
      hub.offer(key, own_->export_fd(), exchange.world_size());
      mine.offer_key = RecordText<160>(key);
    } else {
      mine.handle = own_->ipc_handle();
    }
    if (exchange.rank() != 0) return;
    shm::UniqueFd fd = shm::create_memfd(host_bytes, "ringcomm-cuda");
    host_memory_ = shm::SharedMemory(fd.get(), host_bytes);
    host_offer_key_ = key + "/host";
    hub.offer(host_offer_key_, std::move(fd), exchange.world_size());
    mine.host_offer_key = RecordText<160>(host_offer_key_);
  });
  return mine;
}

void DeviceGroup::map_peer(int peer, const Place& place, const Memory& memory,
                           std::size_t host_bytes) {
  shm::ProcessHub& hub = shm::ProcessHub::instance();
  const auto fetch = [&](const std::string& key) {
    shm::UniqueFd fd = hub.fetch(place.hub_address.str(), key, kFetchTimeout);
    if (!fd)
      throw Error({.kind = ErrorKind::kSystem, .rank = peer},
                  "ringcomm: rank " + std::to_string(peer) + " did not hand over its memory");
    return fd;
  };
  if (peer == 0)
    host_memory_ = shm::SharedMemory(fetch(memory.host_offer_key.str()).get(), host_bytes);
  std::unique_ptr<DeviceMemory>& mapped = mapped_[static_cast<std::size_t>(peer)];
  DeviceUuid own_device = {};
  check(driver().device_get_uuid(&own_device, device_), "ask the GPU for its name");
  const bool is_here = place.pid == ::getpid();
  if (is_here && std::memcmp(&own_device, &place.device, sizeof own_device) == 0) {
    staging_.of[peer] = memory.address;  // of a thread of this process
    return;
  }
  if (is_here && memory.offer_key.str().empty())
    throw Error(
        {.kind = ErrorKind::kSystem, .rank = peer},
        "ringcomm: threads of one process on several GPUs need memory that is handed out by "
        "file descriptors, which this driver has not");
  if (!memory.offer_key.str().empty())
    mapped = std::make_unique<DeviceMemory>(device_, staging_.layout.num_bytes(),
                                            fetch(memory.offer_key.str()));
  else
    mapped = std::make_unique<DeviceMemory>(device_, staging_.layout.num_bytes(), memory.handle);
  staging_.of[peer] = mapped->data();
  probe_peer(peer);
}

// Zeros, which all cursors begin with, and a signature where nothing else lies.
void DeviceGroup::clear_staging(int rank) {
  const SideStream stream;
  std::byte* staging = staging_.of[rank];
  const auto address = reinterpret_cast<DevicePtr>(staging);
  check(driver().memset_d8_async(address, 0, staging_.layout.num_bytes(), stream.get()),
        "clear staging memory");
  auto* words = static_cast<std::uint64_t*>(control_->host());
  words[0] = signature(rank);
  const auto word = reinterpret_cast<DevicePtr>(control_->device());
  check(driver().memcpy_async(address + StagingLayout::kSignatureOffset, word, sizeof *words,
                              stream.get()),
        "write to staging memory");
  stream.finish();
  words[0] = 0;
}

void DeviceGroup::probe_peer(int peer) {
  const SideStream stream;
  const auto address = reinterpret_cast<DevicePtr>(staging_.of[peer]);
  const MappedHostMemory found(device_, sizeof(std::uint64_t));
  check(driver().memcpy_async(reinterpret_cast<DevicePtr>(found.device()),
                              address + StagingLayout::kSignatureOffset, sizeof(std::uint64_t),
                              stream.get()),
        "read another rank's memory");
  stream.finish();
  std::uint64_t word = 0;
  std::memcpy(&word, found.host(), sizeof word);
  if (word != signature(peer))
    throw Error({.kind = ErrorKind::kSystem, .rank = peer},
                "ringcomm: the memory that rank " + std::to_string(peer) +
                    " handed over is not what it has written to");
}

}  // namespace ringcomm::cuda

#include "cuda/collectives/device_group.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>

#include "cuda/collectives/device_transport.h"
#include "cuda/collectives/events.h"
#include "cuda/collectives/launches.h"
#include "host/fd.h"
#include "host/rank_record.h"

namespace ringcomm::cuda {
namespace {

// What a rank writes to the memory of its peers, which look for it.
std::uint64_t signature(int rank) { return 0x52494e47434f4d4dU + static_cast<unsigned>(rank); }

// A word in the scratch memory of `reader`, for what `writer` writes to probe it.
std::byte* probed_word(const Staging& staging, int writer, int reader) {
  return staging.scratch(reader) + static_cast<std::size_t>(writer) * sizeof(std::uint64_t);
}

int attribute_of(DeviceOrdinal device, DeviceAttribute attribute) {
  int value = 0;
  check(driver().device_get_attribute(&value, attribute, device), "ask the GPU for its attributes");
  return value;
}

// A rank's record of memory that it offers.
struct Offered {
  RecordText<160> key;
  RecordText<256> problem;
};

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
  const bool has_few_queues =
      place(exchange_.rank()).has_mps && std::getenv("CUDA_DEVICE_MAX_CONNECTIONS") == nullptr;
  description_ = "cuda_ipc by file descriptors: " + std::to_string(facts_.max_ranks_per_device) +
                 " ranks on a GPU, " + std::to_string(staging_.layout.num_blocks) +
                 " blocks that wait, " + std::to_string(staging_.layout.num_bytes() >> 20) +
                 " MiB of staging each" + (facts_.has_switches ? ", switches that add" : "") +
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
    const char* sums = std::getenv("NCCL_NVLS_ENABLE");
    mine.has_multicast = attribute_of(device_, kMulticastSupported) != 0 &&
                         (sums == nullptr || std::strcmp(sums, "0") != 0);
    const char* maps = std::getenv("RINGCOMM_MAP_TENSORS");
    mine.maps_tensors = maps == nullptr || std::strcmp(maps, "0") != 0;
    if (attribute_of(device_, kVirtualMemoryManagementSupported) == 0 ||
        attribute_of(device_, kHandleTypePosixFdSupported) == 0)
      throw std::runtime_error("the GPU does not share memory by file descriptors");
    Kernels::of(device_);  // a device that cannot run them is found out before any memory is shared
    std::size_t all_bytes = 0;
    check(driver().mem_get_info(&mine.free_bytes, &all_bytes), "ask the GPU for its free memory");
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

// What is in front of the scratch memory is zeroed. The first words of that are probed.
void DeviceGroup::share_staging() {
  std::optional<host::Offer> offer;  // until all have mapped it
  const int own = exchange_.rank();
  parts_.resize(places_.size());
  Offered mine;
  mine.problem = attempt([&] {
    auto& part = parts_[static_cast<std::size_t>(own)];
    part = std::make_unique<DeviceMemory>(device_, staging_.layout.num_bytes());
    copy_and_wait(part->data(), nullptr,
                  staging_.layout.scratch_offset() + kMaxRanks * sizeof(std::uint64_t),
                  "clear memory of the GPU");
    mine.key = RecordText<160>(offer.emplace(part->export_fd()).key());
  });
  const std::vector<Offered> all = exchange_.all_gather(mine);
  check_problems(all);
  agree(
      exchange_, attempt([&] {
        for (int rank = 0; rank < exchange_.world_size(); ++rank) {
          const auto idx = static_cast<std::size_t>(rank);
          if (rank != own)
            parts_[idx] = std::make_unique<DeviceMemory>(
                device_, staging_.layout.num_bytes(),
                host::Offer::fetch(place(rank).bootstrap_address.str(), rank, all[idx].key.str()));
          staging_.of[rank] = parts_[idx]->data();
          if (rank != own) probe(rank);
        }
      }));
  // Some machines lose what one GPU writes to the memory of another.
  agree(exchange_, attempt([&] {
          for (int rank = 0; rank < exchange_.world_size(); ++rank) {
            if (rank == own) continue;
            copy_and_wait(&control_on_device()->copied, probed_word(staging_, rank, own),
                          sizeof control().copied, "read memory of the GPU");
            if (control().copied != signature(rank))
              throw Unavailable("what rank " + std::to_string(rank) +
                                " writes to this GPU is lost; NCCL may need NCCL_P2P_DISABLE=1");
          }
        }));
}

// By kernels: the driver's copies may take another way.
void DeviceGroup::probe(int peer) {
  auto* const here = reinterpret_cast<std::byte*>(&control_on_device()->copied);
  std::byte* const there = probed_word(staging_, exchange_.rank(), peer);
  control().copied = signature(exchange_.rank());
  for (const auto& [to, from] : {std::pair(there, here), std::pair(here, there)}) {
    KernelCall call;
    call.dtype = DType::kInt64;
    call.num_elems = call.num_outputs = 1;
    call.inputs[0] = from;
    call.outputs[0] = to;
    const auto copy = [&](StreamHandle stream) {
      Kernels::of(device_).launch("ringcomm_reduce_any", 1, call, stream);
    };
    run_and_wait(copy, "reach another rank's memory");
    if (to == there) control().copied = 0;  // what comes back is read there
  }
  if (control().copied != signature(exchange_.rank()))
    throw Unavailable("what this rank writes to the GPU of rank " + std::to_string(peer) +
                      " is not what it reads there");
}

}  // namespace ringcomm::cuda

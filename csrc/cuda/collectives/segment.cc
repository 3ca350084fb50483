#include "cuda/collectives/segment.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

#include "core/errors.h"
#include "cuda/collectives/events.h"
#include "transport/shm/bootstrap.h"

namespace ringcomm::cuda {
namespace {

constexpr std::chrono::milliseconds kFetchTimeout{10'000};
// Ranks that end together close within milliseconds; one that lives on may never close.
constexpr std::chrono::seconds kPatience{5};

// The signature that every rank writes into its own part and checks in the others'.
std::uint64_t signature(int rank) { return 0x52494e47434f4d4dU + static_cast<unsigned>(rank); }

// Memory of this process's ranks, for ranks that are other threads of the process.
class OwnMemories {
 public:
  static OwnMemories& all() {
    static OwnMemories& memories = *new OwnMemories;  // threads may use it until the process ends
    return memories;
  }
  std::uint64_t add(const std::shared_ptr<DeviceMemory>& memory) {
    const std::lock_guard lock(mutex_);
    std::erase_if(memories_, [](const auto& item) { return item.second.expired(); });
    memories_[++num_added_] = memory;
    return num_added_;
  }
  std::shared_ptr<DeviceMemory> find(std::uint64_t number, int rank) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<DeviceMemory> memory = memories_[number].lock();
    if (memory == nullptr)
      throw Error({.kind = ErrorKind::kSystem, .rank = rank},
                  "ringcomm: rank " + std::to_string(rank) + " has released its memory");
    return memory;
  }

 private:
  std::mutex mutex_;
  std::uint64_t num_added_ = 0;
  std::map<std::uint64_t, std::weak_ptr<DeviceMemory>> memories_;
};

}  // namespace

struct Segment::Part {
  RecordText<160> offer_key;
  IpcMemHandle handle = {};
  std::uint64_t number = 0;  // of the memory, where threads of one process are ranks
  std::uint64_t num_bytes = 0;
  RecordText<256> problem;
};

Offer::Offer(shm::UniqueFd fd) {
  static std::atomic<int> num_offers = 0;
  key_ = shm::Bootstrap::instance().address() + "/cuda/" + std::to_string(num_offers++);
  shm::Bootstrap::instance().offer(key_, std::move(fd));
}

shm::UniqueFd Offer::fetch(const RankPlace& place, int rank, const std::string& key) {
  shm::UniqueFd fd = shm::Bootstrap::instance().fetch(place.bootstrap_address, key, kFetchTimeout);
  if (!fd)
    throw Error({.kind = ErrorKind::kSystem, .rank = rank},
                "ringcomm: rank " + std::to_string(rank) + " did not hand over its memory");
  return fd;
}

Exports::Exports(GroupWords& words, int rank, const std::vector<RankPlace>& places)
    : words_(words), rank_(static_cast<std::size_t>(rank)) {
  for (const RankPlace& place : places)
    peers_.push_back(place.pid == ::getpid()
                         ? nullptr
                         : shm::Bootstrap::instance().watch(place.bootstrap_address, place.pid));
}

Exports::~Exports() {
  words_.ranks[rank_].has_closed = 1;
  if (exported_.empty()) return;
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!all_have_closed()) {
    if (std::chrono::steady_clock::now() >= deadline) {
      new std::vector<std::shared_ptr<DeviceMemory>>(std::move(exported_));  // never freed
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool Exports::all_have_closed() const {
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (peers_[peer] == nullptr || peers_[peer]->is_dead) continue;
    if (words_.ranks[peer].has_closed == 0) return false;
  }
  return true;
}

Segment::Segment(RecordExchange& exchange, DeviceOrdinal device,
                 const std::vector<RankPlace>& places, HandleKind kind, std::size_t num_bytes,
                 Exports& exports, MappedHostMemory& word)
    : device_(device),
      num_bytes_(num_bytes),
      word_(word),
      theirs_(places.size()),
      parts_(places.size()) {
  const std::vector<Part> parts = exchange.all_gather(make_own(exchange, kind, exports));
  try {
    check_problems(parts);
    agree(exchange, attempt([&] {
            for (int peer = 0; peer < exchange.world_size(); ++peer) {
              const auto idx = static_cast<std::size_t>(peer);
              if (peer != exchange.rank()) map(peer, places[idx], parts[idx]);
            }
          }));
    // Zeroed, including the signatures, before any rank uses it.
    agree(exchange, attempt([&] {
            clear_and_wait(own_->data(), own_->num_bytes(), "clear memory of the GPU");
          }));
  } catch (const Unavailable&) {
    close_others();
    exchange.all_gather(0);  // all ranks are here, and none has a part of another's open after this
    exports.drop(own_);
    throw;
  }
  offer_.reset();
}

Segment::Part Segment::make_own(RecordExchange& exchange, HandleKind kind, Exports& exports) {
  Part part;
  part.problem = attempt([&] {
    own_ = std::make_shared<DeviceMemory>(device_, num_bytes_, kind);
    part.number = OwnMemories::all().add(own_);
    part.num_bytes = own_->num_bytes();
    parts_[static_cast<std::size_t>(exchange.rank())] = own_->data();
    const std::uint64_t value = signature(exchange.rank());
    std::memcpy(word_.host(), &value, sizeof value);
    copy_and_wait(own_->data(), word_.device(), sizeof value, "write to memory of the GPU");
    if (kind == HandleKind::kIpc) {
      exports.keep(own_);
      part.handle = own_->ipc_handle();
      return;
    }
    part.offer_key = RecordText<160>(offer_.emplace(own_->export_fd()).key());
  });
  return part;
}

void Segment::map(int peer, const RankPlace& place, const Part& part) {
  const auto idx = static_cast<std::size_t>(peer);
  DeviceUuid own_device = {};
  check(driver().device_get_uuid(&own_device, device_), "ask the GPU for its name");
  const std::string key = part.offer_key.str();
  if (place.pid == ::getpid()) {
    if (std::memcmp(&own_device, &place.device, sizeof own_device) == 0) {
      theirs_[idx] = OwnMemories::all().find(part.number, peer);
      parts_[idx] = theirs_[idx]->data();
      return;
    }
    if (key.empty())
      throw Error({.kind = ErrorKind::kSystem, .rank = peer},
                  "ringcomm: threads of one process on several GPUs need memory handles that are "
                  "file descriptors, which this driver does not support");
  }
  theirs_[idx] = key.empty() ? std::make_shared<DeviceMemory>(device_, part.num_bytes, part.handle)
                             : std::make_shared<DeviceMemory>(device_, part.num_bytes,
                                                              Offer::fetch(place, peer, key));
  parts_[idx] = theirs_[idx]->data();
  copy_and_wait(word_.device(), parts_[idx], sizeof(std::uint64_t), "read another rank's memory");
  std::uint64_t value = 0;
  std::memcpy(&value, word_.host(), sizeof value);
  if (value != signature(peer))
    throw Error({.kind = ErrorKind::kSystem, .rank = peer},
                "ringcomm: the memory that rank " + std::to_string(peer) +
                    " handed over is not the memory that it has written to");
}

}  // namespace ringcomm::cuda

#include "cuda/collectives/leaving.h"

#include <unistd.h>

#include <chrono>
#include <thread>

namespace ringcomm::cuda {
namespace {

// Ranks that end together close within milliseconds; one that lives on may never close.
constexpr std::chrono::seconds kPatience{5};

}  // namespace

Leaving::Leaving(std::byte* words, int rank, const std::vector<RankPlace>& places)
    : words_(words), rank_(static_cast<std::size_t>(rank)) {
  for (const RankPlace& place : places)
    peers_.push_back(place.pid == ::getpid()
                         ? nullptr
                         : shm::Bootstrap::instance().watch(place.bootstrap_address, place.pid));
}

Leaving::~Leaving() {
  __atomic_store_n(&has_closed(rank_), 1u, __ATOMIC_RELEASE);
  if (exported_.empty()) return;
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (!all_have_closed()) {
    if (std::chrono::steady_clock::now() >= deadline) {
      new std::vector<std::shared_ptr<void>>(std::move(exported_));  // never freed
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool Leaving::all_have_closed() const {
  for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
    if (peers_[peer] == nullptr || peers_[peer]->is_dead) continue;
    if (__atomic_load_n(&has_closed(peer), __ATOMIC_ACQUIRE) == 0) return false;
  }
  return true;
}

}  // namespace ringcomm::cuda

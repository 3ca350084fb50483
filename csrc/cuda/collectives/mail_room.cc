#include "cuda/collectives/mail_room.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "cuda/collectives/staging_plan.h"

namespace ringcomm::cuda {
namespace {

constexpr std::uint32_t kUndecided = 0;
constexpr std::uint32_t kDeciding = 1;
constexpr std::uint32_t kDecided = 2;
constexpr std::chrono::microseconds kPoll{20};

bool take_in_all(const std::vector<std::unique_ptr<DeviceRoom>>& rooms, unsigned num_seats) {
  for (const auto& room : rooms) {
    if (room->take(static_cast<int>(num_seats))) continue;
    for (const auto& taken : rooms) taken->give_all_back();
    return false;
  }
  return true;
}

}  // namespace

std::uint32_t& MailRoom::word_of(int peer) const {
  const auto [lower, higher] = std::minmax(rank_, peer);
  return words_[static_cast<std::size_t>(lower) * places_.size() +
                static_cast<std::size_t>(higher)];
}

unsigned MailRoom::blocks_with(int peer, const std::function<void()>& look) {
  std::uint32_t& word = word_of(peer);
  std::uint32_t seen = kUndecided;
  if (__atomic_compare_exchange_n(&word, &seen, kDeciding, false, __ATOMIC_ACQ_REL,
                                  __ATOMIC_ACQUIRE)) {
    unsigned num_blocks = 0;
    try {
      num_blocks = take_seats(peer);
    } catch (...) {
      __atomic_store_n(&word, kDecided, __ATOMIC_RELEASE);
      throw;
    }
    __atomic_store_n(&word, kDecided + num_blocks, __ATOMIC_RELEASE);
    return num_blocks;
  }
  for (; seen == kDeciding; seen = __atomic_load_n(&word, __ATOMIC_ACQUIRE)) {
    look();
    std::this_thread::sleep_for(kPoll);
  }
  return seen - kDecided;
}

unsigned MailRoom::take_seats(int peer) {
  const RankPlace& own = places_[static_cast<std::size_t>(rank_)];
  const RankPlace& theirs = places_[static_cast<std::size_t>(peer)];
  std::vector<std::unique_ptr<DeviceRoom>> rooms;
  rooms.push_back(std::make_unique<DeviceRoom>(own.device, own.num_seats));
  if (std::memcmp(&own.device, &theirs.device, sizeof own.device) != 0)
    rooms.push_back(std::make_unique<DeviceRoom>(theirs.device, theirs.num_seats));
  int num_free = own.num_seats;
  for (const auto& room : rooms) num_free = std::min(num_free, room->num_free());
  // Free seats may be held for a moment by another rank's attempt to take more.
  for (unsigned num_blocks = std::max(1u, blocks_per_lane_that_fit(layout_, num_free));
       num_blocks > 0; num_blocks /= 2) {
    if (!take_in_all(rooms, 2 * num_blocks)) continue;
    for (auto& room : rooms) rooms_.push_back(std::move(room));
    return num_blocks;
  }
  return 0;
}

}  // namespace ringcomm::cuda

#pragma once

#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "ptx/weak_memory.h"

namespace ringcomm::ptx::weak {

/// Pairs of an address and a number, of all threads; one set for each `Of`.
template <class Of>
class Pairs {
 public:
  static Pairs& all() {
    static auto& all = *new Pairs;
    return all;
  }
  bool is_empty() {
    const std::lock_guard lock(mutex_);
    return pairs_.empty();
  }
  void add(u64 address, u32 number) {
    const std::lock_guard lock(mutex_);
    pairs_.emplace(address, number);
  }
  bool has(u64 address, u32 number) {
    const std::lock_guard lock(mutex_);
    return pairs_.count({address, number}) != 0;
  }
  /// Whether the address has another number than this.
  bool has_another(u64 address, u32 number) {
    const std::lock_guard lock(mutex_);
    const auto first = pairs_.lower_bound({address, 0});
    for (auto pair = first; pair != pairs_.end() && pair->first == address; ++pair)
      if (pair->second != number) return true;
    return false;
  }

 private:
  std::mutex mutex_;
  std::set<std::pair<u64, u32>> pairs_;
};

/// By cursor, which of a kernel's stores to it are by a weakened line: the first, the second, ...
/// Calls run the same program, so it is likely to be so in later ones.
using WeakenedStores = Pairs<struct Stored>;
/// What a weakened acquire has loaded, by the GPU that did.
using WeaklyAcquired = Pairs<struct Acquired>;

/// A release that a mutant made relaxed may take effect before earlier loads of its block; so may
/// one for those who acquire by a load that a mutant made relaxed. This guesses it: a cursor gets
/// the next number. A run in which that store does not come, or is acquired before, shows nothing.
class EarlyStores {
 public:
  /// A thread has loaded with acquire: maybe the wait that the next store depends on.
  void acquired(u32 thread, u64 address) {
    acquired_[thread] = last_awaited_[thread] = address;
    if (is_first_early_) end_without_result();  // the store comes after this wait
    for (const auto& [key, cursor] : cursors_)
      if (cursor.is_early && key.first == thread && cursor.awaits == address) end_without_result();
  }
  /// All waits before a barrier of the block are over.
  void passed_barrier() {
    for (auto& [key, cursor] : cursors_) {
      const bool is_after_first = cursor.is_first && !acquired_.empty();
      if (has_waited(key.first, cursor) || is_after_first) cursor.may_be_early = true;
    }
    acquired_.clear();
  }
  /// A store of the next number. Returns whether it has been made early.
  bool is_made(u32 thread, u64 address, u64 value, bool is_weakened) {
    Cursor& cursor = cursors_[{thread, address}];
    const bool was_early = cursor.is_early;
    if (was_early && (value != cursor.value + 1 || !is_weakened)) end_without_result();
    if (was_early) is_first_early_ = false;
    const u32 ordinal = cursor.ordinal + 1;
    if (is_weakened) WeakenedStores::all().add(address, ordinal);
    const auto last = last_awaited_.find(thread);
    cursor = {.value = value, .ordinal = ordinal};
    if (is_weakened)
      cursor.awaits = last == last_awaited_.end() ? 0 : last->second;
    else
      cursor.is_first = WeakenedStores::all().has(address, ordinal + 1);
    return was_early;
  }
  /// At a load: calls store(thread, address, value) once per block, for one that may be early and
  /// whose address is_wanted().
  template <class Wanted, class F>
  bool make_one(u64 random, const Wanted& is_wanted, const F& store) {
    if (has_made_one_ || random % kLoadsPerStore != 0) return false;
    for (auto& [key, cursor] : cursors_) {
      const bool may_be = cursor.may_be_early || has_waited(key.first, cursor);
      if (!may_be || !is_wanted(key.second)) continue;
      cursor.is_early = has_made_one_ = true;
      is_first_early_ = cursor.is_first;
      store(key.first, key.second, cursor.value + 1);
      return true;
    }
    return false;
  }
  void end() const {
    for (const auto& [key, cursor] : cursors_)
      if (cursor.is_early) end_without_result();
  }

 private:
  static constexpr u64 kLoadsPerStore = 2000;
  struct Cursor {
    u64 value = 0;
    u64 awaits = 0;         ///< what its thread waited for before it
    u32 ordinal = 0;        ///< of the store, of its thread to this cursor
    bool is_first = false;  ///< whether the next store is the first one of a weakened line
    bool may_be_early = false;
    bool is_early = false;
  };
  bool has_waited(u32 thread, const Cursor& cursor) const {
    const auto last = acquired_.find(thread);
    return last != acquired_.end() && last->second == cursor.awaits;
  }
  std::map<std::pair<u32, u64>, Cursor> cursors_;  // by thread and address
  std::map<u32, u64> acquired_, last_awaited_;
  bool has_made_one_ = false;
  bool is_first_early_ = false;
};

}  // namespace ringcomm::ptx::weak

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/arch.h"
#include "core/wait_policy.h"

namespace ringcomm {

/// Ranks of one machine, as bits.
class RankSet {
 public:
  static constexpr int kMaxRanks = 512;
  static constexpr int kWords = kMaxRanks / 64;

  bool has(int rank) const { return (words_[word_of(rank)] >> (rank % 64) & 1) != 0; }
  void add(int rank) { words_[word_of(rank)] |= std::uint64_t{1} << (rank % 64); }
  std::uint64_t& word(int idx) { return words_[static_cast<std::size_t>(idx)]; }
  static int word_of(int rank) { return rank / 64; }

 private:
  std::array<std::uint64_t, kWords> words_ = {};
};

/// How the ranks of a group that has failed agree on the ranks that go on: docs/design/shrink.md,
/// "The agreement".
///
/// `Words` has the words of the agreement, all 0 at first: `stage(rank)`, a Cursor;
/// `proposal(attempt, rank, idx)`, `chosen(attempt)` and `verdict(attempt)`. Beside an Arch, the
/// machine has set_first(), which writes a word if it is 0, and read_once(), an acquiring load of a
/// word that no wait looks at.
template <Arch A, class Words>
class SurvivorProtocol {
 public:
  enum Stage : std::uint8_t { kJoined = 1, kHasStore, kMade, kNumStages = kMade };
  enum Verdict : std::uint8_t { kAllMade = 1, kFailed };

  SurvivorProtocol(A& arch, const Words& words, int rank, int world_size)
      : arch_(arch), words_(words), rank_(rank), world_size_(world_size) {}

  /// Takes part in an attempt (from 0 on) with the ranks of `asked` that arrive before the machine
  /// says to wait no longer. Afterwards a set has been chosen, unless it returns kInterrupted.
  WaitStatus join(int attempt, const RankSet& asked) {
    RankSet here;
    add(attempt, here, rank_);
    enter(attempt, kJoined);
    for (int peer = 0; peer < world_size_; ++peer) {
      if (peer == rank_ || !asked.has(peer)) continue;
      const WaitStatus stop = wait_for(attempt, kJoined, peer);
      if (stop == WaitStatus::kInterrupted) return stop;
      const WaitStatus now = stop == WaitStatus::kNone ? arch_.stopped(peer) : stop;
      if (stop == WaitStatus::kNone && now != WaitStatus::kPeerDied && now != WaitStatus::kPeerLeft)
        add(attempt, here, peer);
    }
    arch_.set_first(words_.chosen(attempt), static_cast<std::uint64_t>(rank_) + 1);
    return WaitStatus::kNone;
  }

  /// The set that was chosen in an attempt; false if none was yet.
  bool find_chosen(int attempt, RankSet& set) const {
    const std::uint64_t chosen = arch_.read_once(words_.chosen(attempt));
    if (chosen == 0 || chosen > static_cast<std::uint64_t>(world_size_)) return false;
    for (int idx = 0; idx <= RankSet::word_of(world_size_ - 1); ++idx)
      set.word(idx) = arch_.read_once(words_.proposal(attempt, static_cast<int>(chosen) - 1, idx));
    return true;
  }

  void enter(int attempt, Stage stage) {
    advance(arch_, words_.stage(rank_), value_of(attempt, stage));
  }
  WaitStatus wait_for(int attempt, Stage stage, int peer) {
    return wait_at_least(arch_, words_.stage(peer), value_of(attempt, stage), peer);
  }

  /// Whether all ranks of `set` have made the new group, as all of them are told.
  bool confirm(int attempt, const RankSet& set, bool has_made) {
    if (has_made) enter(attempt, kMade);
    for (int peer = 0; peer < world_size_ && has_made; ++peer)
      if (peer != rank_ && set.has(peer))
        has_made = wait_for(attempt, kMade, peer) == WaitStatus::kNone;
    arch_.set_first(words_.verdict(attempt), has_made ? kAllMade : kFailed);
    return arch_.read_once(words_.verdict(attempt)) == kAllMade;
  }

  static std::uint64_t value_of(int attempt, Stage stage) {
    return static_cast<std::uint64_t>(attempt) * kNumStages + stage;
  }

 private:
  // Each rank's proposal is complete before it is chosen, and never changes after that.
  void add(int attempt, RankSet& here, int rank) {
    here.add(rank);
    const int idx = RankSet::word_of(rank);
    arch_.store_seq_cst(words_.proposal(attempt, rank_, idx), here.word(idx));
  }

  A& arch_;
  Words words_;
  int rank_;
  int world_size_;
};

}  // namespace ringcomm

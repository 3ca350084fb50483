#pragma once

#include <cstddef>
#include <cstdint>

#include "core/board_protocol.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/call.h"

// Where the ranks of a call meet: one block of each publishes what its rank has for the others, and
// waits for theirs. The kernels between two rendezvous wait for nobody.

namespace ringcomm::cuda {

/// Calls f(i) for i below `num`, each by one thread of the block.
template <Block B, class F>
RINGCOMM_HD void deal(const B& block, int num, const F& f) {
  RINGCOMM_ROLLED
  for (auto i = static_cast<int>(block.thread_idx()); i < num;
       i += static_cast<int>(block.num_threads()))
    f(i);
}

/// The part of tell() that one thread runs; `word_of` returns the words of Control::theirs.
template <Block B, class WordOf>
RINGCOMM_HD void tell_alone(B& block, const GroupFrame& call, std::uint32_t stop, int peer,
                            const WordOf& word_of) {
  Control& control = *call.control;
  if (block.claim(call.staging.words(call.rank).is_reported)) {
    control.peer = peer;
    control.launch = call.launch;
    RINGCOMM_ROLLED
    for (int i = 0; i < kHeaderWords; ++i) control.theirs[i] = word_of(i);
    block.publish_word(control.stop, stop);
  }
  block.publish_word(control.abort, 1);  // for the other blocks of this rank
}

/// Reports to the host that this kernel has failed, unless another block was faster.
template <Block B, class WordOf>
RINGCOMM_HD void tell(B& block, const GroupFrame& call, std::uint32_t stop, int peer,
                      const WordOf& word_of) {
  block.sync();
  if (block.thread_idx() == 0) tell_alone(block, call, stop, peer, word_of);
}

struct NoWords {
  RINGCOMM_HD std::uint32_t operator()(int) const { return 0; }
};

/// Detects two calls of a rank that run at the same time, such as a replayed graph and an unordered
/// call on another stream, and would mix their data. The result of the atomic is read in check(),
/// so that other loads overlap with it.
template <Block B>
class Claim {
 public:
  RINGCOMM_HD Claim(B& block, std::uint32_t& busy)
      : was_free_(block.thread_idx() != 0 || block.claim(busy)) {}
  RINGCOMM_HD bool check(B& block, const GroupFrame& call) const {
    if (!was_free_) tell_alone(block, call, kOverlap, call.rank, NoWords());
    return was_free_;
  }
  RINGCOMM_HD static void end(B& block, std::uint32_t& busy) {
    block.sync();
    if (block.thread_idx() == 0) block.unclaim(busy);
  }

 private:
  bool was_free_;
};

/// Of a kernel that has stopped for this reason, if any.
template <Block B>
RINGCOMM_HD void finish(B& block, const GroupFrame& call, WaitStatus stop) {
  if (stop == WaitStatus::kAborted && block.thread_idx() == 0)
    block.claim(
        call.staging.words(call.rank).is_reported);  // so that later kernels report no consequence
  if (stop != WaitStatus::kNone && stop != WaitStatus::kAborted)
    tell(block, call, static_cast<std::uint32_t>(stop), block.awaited_peer(), NoWords());
}

/// The two rendezvous of a call, each a kernel of one block.
template <Block B>
class Rendezvous {
 public:
  RINGCOMM_HD Rendezvous(B& block, const KernelCall& call)
      : block_(block),
        call_(call),
        table_(call.staging.table(call.rank)),
        board_(block, Meeting(call.staging), call.rank) {}

  /// Whether a launch of a later piece has nothing to do: the first one has done it.
  RINGCOMM_HD static bool is_done(const KernelCall& call) {
    return call.piece_begin > 0 && call.staging.table(call.rank).is_whole != 0;
  }

  /// Publishes this rank's notice and reads the others'.
  RINGCOMM_HD WaitStatus open() {
    std::byte* region = nullptr;
    if (const WaitStatus stop = board_.open(region); stop != WaitStatus::kNone) return stop;
    write(call_.staging.notice(call_.rank, board_.phase()));
    board_.publish();
    if (const WaitStatus stop = board_.wait_all(); stop != WaitStatus::kNone) return stop;
    if (const WaitStatus stop = compare(); stop != WaitStatus::kNone) return stop;
    WaitStatus staged = WaitStatus::kNone;
    deal(block_, call_.world_size, [&](int rank) {
      const CallNotice& theirs = notice(rank);
      table_.inputs[rank] = call_.find(theirs.inputs[call_.rank], rank);
      table_.outputs[rank] = call_.find(theirs.outputs[call_.rank], rank);
      if (theirs.is_staged != 0) staged = WaitStatus::kAborted;
    });
    const bool is_staged = block_.agree(staged) != WaitStatus::kNone;
    if (block_.thread_idx() == 0) {
      table_.is_whole = is_staged ? 0 : 1;
      table_.is_open = 1;
    }
    return WaitStatus::kNone;
  }

  /// Waits until all ranks have ended what is between the two; does nothing after a failure.
  RINGCOMM_HD WaitStatus close() {
    return table_.is_open != 0 ? board_.rejoin() : WaitStatus::kAborted;
  }

 private:
  RINGCOMM_HD const CallNotice& notice(int rank) const {
    return call_.staging.notice(rank, board_.phase() - 1);
  }
  RINGCOMM_HD void write(CallNotice& notice) {
    deal(block_, kHeaderWords, [&](int i) { notice.header[i] = call_.header[i]; });
    deal(block_, call_.world_size, [&](int i) {
      notice.inputs[i] = call_.input_places[i];
      notice.outputs[i] = call_.output_places[i];
    });
    if (block_.thread_idx() == 0)
      notice.is_staged = call_.stages_inputs || call_.stages_outputs ? 1 : 0;
  }

  /// Whether all ranks made this call. If not, reports it to the host.
  RINGCOMM_HD WaitStatus compare() {
    WaitStatus stop = WaitStatus::kNone;
    const int num_words = call_.world_size * kHeaderWords;
    const auto is_same = [&](int i) {
      return notice(i / kHeaderWords).header[i % kHeaderWords] == call_.header[i % kHeaderWords];
    };
    deal(block_, num_words, [&](int i) {
      if (!is_same(i)) stop = WaitStatus::kAborted;
    });
    if (block_.agree(stop) == WaitStatus::kNone) return WaitStatus::kNone;
    RINGCOMM_ROLLED
    for (int i = 0; i < num_words; ++i) {
      if (is_same(i)) continue;
      const CallNotice& theirs = notice(i / kHeaderWords);
      tell(block_, call_, kMismatch, i / kHeaderWords,
           [&](int word) { return theirs.header[word]; });
      break;
    }
    return WaitStatus::kAborted;
  }

  B& block_;
  const KernelCall& call_;
  CallTable& table_;
  Board<B, Meeting> board_;
};

/// After a failure, peers may arrive before the hosts know. They must not take a later call's data
/// for this one's, so no later kernel of the rank may get past its rendezvous: its own cursor is
/// set to a phase that no peer reaches.
template <Block B>
RINGCOMM_HD void poison(B& block, const GroupFrame& call) {
  if (block.thread_idx() == 0)
    call.staging.published(call.rank, call.rank).value = Staging::kFailed;
}

template <Block B>
RINGCOMM_HD void open_call(B& block, const KernelCall& call) {
  if (Rendezvous<B>::is_done(call)) return;
  CallTable& table = call.staging.table(call.rank);
  const Claim<B> claim(block, call.staging.words(call.rank).is_in_call);
  // All threads have read what the last call left.
  block.sync();
  if (block.thread_idx() == 0) table.is_open = 0;
  Rendezvous<B> rendezvous(block, call);
  claim.check(block, call);
  const WaitStatus stop = rendezvous.open();
  finish(block, call, stop);
  if (stop == WaitStatus::kNone) return;
  poison(block, call);
  Claim<B>::end(block, call.staging.words(call.rank).is_in_call);
}

template <Block B>
RINGCOMM_HD void close_call(B& block, const KernelCall& call) {
  if (Rendezvous<B>::is_done(call)) return;
  const bool was_open = call.staging.table(call.rank).is_open != 0;
  Rendezvous<B> rendezvous(block, call);
  const WaitStatus stop = rendezvous.close();
  if (!was_open) return;
  finish(block, call, stop);
  if (stop != WaitStatus::kNone) {
    poison(block, call);
    if (block.thread_idx() == 0) call.staging.table(call.rank).is_open = 0;
  }
  Claim<B>::end(block, call.staging.words(call.rank).is_in_call);
}

}  // namespace ringcomm::cuda

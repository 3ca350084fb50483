#pragma once

#include <cstddef>
#include <cstdint>

#include "core/board_protocol.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/call.h"
#include "cuda/kernels/memory.h"

namespace ringcomm::cuda {

/// The part of tell() that one thread of a block runs; `word_of` returns the words of
/// Control::theirs.
template <Block B, class WordOf>
RINGCOMM_HD void tell_alone(B& block, const GroupFrame& call, std::uint32_t stop, int peer,
                            const WordOf& word_of) {
  Control& control = *call.control;
  if (block.claim(call.staging.claim(call.rank))) {
    control.peer = peer;
    control.launch = call.launch;
    RINGCOMM_ROLLED
    for (int i = 0; i < kHeaderWords; ++i) control.theirs[i] = word_of(i);
    block.publish_word(control.stop, stop);
  }
  block.publish_word(control.abort, 1);  // for the other blocks of this rank
}

/// Reports to the host that this kernel has failed, unless another block was faster. Not for
/// Stop::kAborted, which the host knows.
template <Block B, class WordOf>
RINGCOMM_HD void tell(B& block, const GroupFrame& call, std::uint32_t stop, int peer,
                      const WordOf& word_of) {
  block.sync();
  if (block.thread_idx() == 0) tell_alone(block, call, stop, peer, word_of);
}

/// For a reason without further words.
struct NoWords {
  RINGCOMM_HD std::uint32_t operator()(int) const { return 0; }
};
/// Up to six words, then zeros.
struct FewWords {
  std::uint32_t first, second, third, fourth = 0, fifth = 0, sixth = 0;
  RINGCOMM_HD std::uint32_t operator()(int i) const {
    return i == 0   ? first
           : i == 1 ? second
           : i == 2 ? third
           : i == 3 ? fourth
           : i == 4 ? fifth
           : i == 5 ? sixth
                    : 0;
  }
};

/// While it exists, this kernel alone uses the resource of the word `busy`. Two kernels of a rank
/// that run at the same time would mix their data, such as a replayed graph and an unordered call
/// on another stream. The result of the atomic is read in check(), so that other loads overlap with
/// it.
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

/// The phases of one call, as a block sees them: its board, and the headings of the first.
template <Block B>
class Phases {
 public:
  RINGCOMM_HD Phases(B& block, const KernelCall& call)
      : block_(block),
        call_(call),
        boards_(call.staging, block.block_idx()),
        board_(block, boards_, call.rank) {}

  /// Waits until this rank's region of the coming phase may be filled. The call's first phase has
  /// its heading, too.
  RINGCOMM_HD Stop open(std::byte*& region, bool is_first) {
    const Stop stop = board_.open(region);
    if (stop == Stop::kNone && is_first)
      write(call_.staging.heading(call_.rank, block_.block_idx(), board_.phase()));
    return stop;
  }

  /// The number of phases that this block of this rank has published, over all calls.
  RINGCOMM_HD std::uint64_t phase() const { return board_.phase(); }

  RINGCOMM_HD void publish() { board_.publish(); }
  RINGCOMM_HD Stop rejoin() { return board_.rejoin(); }

  /// Waits for all peers in the phase published last; in the call's first compares their headers
  /// with this rank's.
  RINGCOMM_HD Stop wait_all(bool is_first) {
    if (const Stop stop = board_.wait_all(); stop != Stop::kNone) return stop;
    return is_first ? compare_headers() : Stop::kNone;
  }

  /// Whether all ranks made this call, after all have published its first phase. If not, reports it
  /// to the host and returns kAborted.
  RINGCOMM_HD Stop compare_headers() {
    Stop stop = Stop::kNone;
    const int num_words = call_.world_size * kHeaderWords;
    RINGCOMM_ROLLED
    for (auto i = static_cast<int>(block_.thread_idx()); i < num_words;
         i += static_cast<int>(block_.num_threads()))
      if (!is_same(i / kHeaderWords, i % kHeaderWords)) stop = Stop::kAborted;
    if (block_.agree(stop) == Stop::kNone) return Stop::kNone;
    RINGCOMM_ROLLED
    for (int i = 0; i < num_words; ++i) {
      if (is_same(i / kHeaderWords, i % kHeaderWords)) continue;
      const Heading& theirs = heading(i / kHeaderWords);
      tell(block_, call_, kMismatch, i / kHeaderWords,
           [&](int word) { return theirs.header[word]; });
      break;
    }
    return Stop::kAborted;
  }

  // ---- calls that use lent buffers if all ranks lend theirs

  /// Before the block's first barrier, in front of the call's first step.
  RINGCOMM_HD void begin_lending() {
    if (block_.thread_idx() == 0) block_.tables().lent.lending = Lending::kUnknown;
  }
  /// Read from shared memory each time, because the loops need the register for data.
  RINGCOMM_HD Lending lending() const { return block_.tables().lent.lending; }
  /// compare_headers(), and reads what is lent; see LentTables.
  RINGCOMM_HD Stop compare_lent() {
    LentTables& lent = block_.tables().lent;
    RINGCOMM_ROLLED
    for (auto rank = static_cast<int>(block_.thread_idx()); rank < call_.world_size;
         rank += static_cast<int>(block_.num_threads())) {
      const Heading& theirs = heading(rank);
      lent.is_lent[rank] = theirs.lends == Lends::kYes;
      lent.is_kept[rank] = theirs.lends == Lends::kNo;
      lent.inputs[rank] = call_.lent.find(theirs.lent_inputs[call_.rank], rank, call_.world_size);
      lent.outputs[rank] = call_.lent.find(theirs.lent_output, rank, call_.world_size);
    }
    if (const Stop stop = compare_headers(); stop != Stop::kNone) return stop;
    if (block_.thread_idx() == 0) {
      bool any_lent = false;
      bool any_kept = false;
      RINGCOMM_ROLLED
      for (int rank = 0; rank < call_.world_size; ++rank) {
        any_lent |= lent.is_lent[rank];
        any_kept |= lent.is_kept[rank];
      }
      lent.lending = !any_lent ? Lending::kNone : any_kept ? Lending::kSome : Lending::kAll;
    }
    block_.sync();
    return Stop::kNone;
  }

  /// The region of `peer` in the last published phase.
  RINGCOMM_HD const std::byte* region(int peer) const {
    return boards_.region(peer, board_.phase() - 1);
  }
  /// The region of a rank in any phase.
  RINGCOMM_HD std::byte* region(int rank, std::uint64_t phase) const {
    return boards_.region(rank, phase);
  }
  RINGCOMM_HD const Heading& heading(int peer) const {
    return call_.staging.heading(peer, block_.block_idx(), board_.phase() - 1);
  }

 private:
  RINGCOMM_HD void write(Heading& heading) {
    const auto thread_idx = static_cast<int>(block_.thread_idx());
    const auto num_threads = static_cast<int>(block_.num_threads());
    RINGCOMM_ROLLED
    for (int i = thread_idx; i < kHeaderWords; i += num_threads)
      heading.header[i] = call_.header[i];
    RINGCOMM_ROLLED
    for (int i = thread_idx; i < call_.world_size; i += num_threads) {
      heading.input_bytes[i] = call_.input_bytes[i];
      heading.output_bytes[i] = call_.output_bytes[i];
      heading.lent_inputs[i] = call_.lent_inputs[i];
    }
    if (thread_idx != 0) return;
    heading.lends = call_.lends;
    heading.lent_output = call_.lent_output;
  }

  RINGCOMM_HD bool is_same(int peer, int word) const {
    return heading(peer).header[word] == call_.header[word];
  }
  B& block_;
  const KernelCall& call_;
  BlockBoards boards_;
  Board<B, BlockBoards> board_;
};

/// Whether this launch does a step of its call; see KernelCall::first_step.
RINGCOMM_HD inline bool does(const KernelCall& call, std::uint32_t step) {
  return call.first_step <= step && step <= call.last_step;
}

/// Reports to the host why this kernel has failed, if it has.
template <Block B>
RINGCOMM_HD void finish(B& block, const GroupFrame& call, Stop stop) {
  if (stop == Stop::kAborted && block.thread_idx() == 0)
    block.claim(call.staging.claim(call.rank));  // so that later kernels report no consequence
  if (stop != Stop::kNone && stop != Stop::kAborted)
    tell(block, call, static_cast<std::uint32_t>(stop), block.awaited_peer(), NoWords());
}

/// A block's part of a collective, which `Run` is made for. After a failure, peers may arrive
/// before the hosts know. They must not take a later call's data for this one's, so no later kernel
/// of the rank may get past open(): its own cursor is set to a phase that no peer reaches.
template <class Run, Block B, class... Arguments>
RINGCOMM_HD void run_collective(B& block, const KernelCall& call, const Arguments&... arguments) {
  const auto busy = [&]() -> std::uint32_t& {
    return call.staging.busy(call.rank, opaque(block.block_idx()));
  };
  const Claim<B> claim(block, busy());
  Run run(block, call, arguments...);
  claim.check(block, call);
  const Stop stop = run.run();
  finish(block, call, stop);
  if (stop != Stop::kNone && block.thread_idx() == 0)
    call.staging.published(call.rank, call.rank, block.block_idx()).value = ~std::uint64_t{0};
  claim.end(block, busy());
}

}  // namespace ringcomm::cuda

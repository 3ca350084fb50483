#pragma once

#include <cstddef>
#include <cstdint>

#include "core/board_protocol.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/call.h"
#include "cuda/kernels/memory.h"

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

/// Up to six words, two in a number, then zeros.
struct FewWords {
  std::uint64_t first = 0, second = 0, third = 0;
  RINGCOMM_HD std::uint32_t operator()(int i) const {
    const std::uint64_t two = i < 2 ? first : i < 4 ? second : i < 6 ? third : 0;
    return static_cast<std::uint32_t>(two >> (i % 2 * 32));
  }
};

/// Detects two kernels of a rank that run at the same time, such as a replayed graph and an
/// unordered call on another stream, and would mix their data. The result of the atomic is read in
/// check(), so that other loads overlap with it.
template <Block B>
class Claim {
 public:
  RINGCOMM_HD Claim(B& block, std::uint32_t& busy)
      : was_free_(block.thread_idx() != 0 || block.claim(busy)) {}
  RINGCOMM_HD bool check(B& block, const GroupFrame& call) const {
    if (!was_free_) tell_alone(block, call, kOverlap, call.rank, FewWords());
    return was_free_;
  }
  RINGCOMM_HD static void end(B& block, std::uint32_t& busy) {
    block.sync();
    if (block.thread_idx() == 0) block.unclaim(busy);
  }

 private:
  bool was_free_;
};

/// The phases of one call, as a block sees them: its board, and the headers of the first.
template <Block B>
class Phases {
 public:
  RINGCOMM_HD Phases(B& block, const KernelCall& call)
      : block_(block),
        call_(call),
        boards_(call.staging, block.block_idx()),
        board_(block, boards_, call.rank) {}

  /// Waits until this rank's region of the coming phase may be filled; in the call's first one
  /// writes the header.
  RINGCOMM_HD WaitStatus open(std::byte*& region, bool is_first) {
    const WaitStatus stop = board_.open(region);
    if (stop == WaitStatus::kNone && is_first)
      write(call_.staging.phase_header(call_.rank, block_.block_idx(), board_.phase()));
    return stop;
  }

  /// The phases that this block has published, over all calls.
  RINGCOMM_HD std::uint64_t phase() const { return board_.phase(); }

  RINGCOMM_HD void publish() { board_.publish(); }
  RINGCOMM_HD WaitStatus rejoin() { return board_.rejoin(); }

  /// Waits for all peers in the phase published last; in the call's first one compares headers.
  RINGCOMM_HD WaitStatus wait_all(bool is_first) {
    if (const WaitStatus stop = board_.wait_all(); stop != WaitStatus::kNone) return stop;
    return is_first ? compare_headers() : WaitStatus::kNone;
  }

  /// Whether all ranks made this call, after all have published its first phase. If not, reports
  /// it to the host and returns kAborted.
  RINGCOMM_HD WaitStatus compare_headers() {
    WaitStatus stop = WaitStatus::kNone;
    const int num_words = call_.world_size * kHeaderWords;
    deal(block_, num_words, [&](int i) {
      if (!is_same(i / kHeaderWords, i % kHeaderWords)) stop = WaitStatus::kAborted;
    });
    if (block_.agree(stop) == WaitStatus::kNone) return WaitStatus::kNone;
    RINGCOMM_ROLLED
    for (int i = 0; i < num_words; ++i) {
      if (is_same(i / kHeaderWords, i % kHeaderWords)) continue;
      const PhaseHeader& theirs = header(i / kHeaderWords);
      tell(block_, call_, kMismatch, i / kHeaderWords,
           [&](int word) { return theirs.header[word]; });
      break;
    }
    return WaitStatus::kAborted;
  }

  // ---- calls that use lent buffers if all ranks lend theirs

  /// Before the block's first barrier, in front of the call's first step.
  RINGCOMM_HD void begin_lending() {
    if (block_.thread_idx() == 0) block_.tables().lent.lending = Lending::kUnknown;
  }
  /// Read from shared memory each time, because the loops need the register for data.
  RINGCOMM_HD Lending lending() const { return block_.tables().lent.lending; }
  /// compare_headers(), and reads what is lent; see LentTables.
  RINGCOMM_HD WaitStatus compare_lent() {
    LentTables& lent = block_.tables().lent;
    deal(block_, call_.world_size, [&](int rank) {
      const PhaseHeader& theirs = header(rank);
      lent.inputs[rank] = call_.lent.find(theirs.lent_inputs[call_.rank], rank, call_.world_size);
      lent.outputs[rank] = call_.lent.find(theirs.lent_output, rank, call_.world_size);
    });
    if (const WaitStatus stop = compare_headers(); stop != WaitStatus::kNone) return stop;
    const auto is_any = [&](Lends what) {
      WaitStatus found = WaitStatus::kNone;
      deal(block_, call_.world_size, [&](int rank) {
        if (header(rank).lends == what) found = WaitStatus::kAborted;
      });
      return block_.agree(found) != WaitStatus::kNone;
    };
    const bool is_any_lent = is_any(Lends::kYes);
    const bool is_any_kept = is_any(Lends::kNo);
    if (block_.thread_idx() == 0)
      lent.lending = !is_any_lent ? Lending::kNone : is_any_kept ? Lending::kSome : Lending::kAll;
    block_.sync();
    return WaitStatus::kNone;
  }

  /// The region of a rank in any phase.
  RINGCOMM_HD std::byte* region(int rank, std::uint64_t phase) const {
    return boards_.region(rank, phase);
  }
  RINGCOMM_HD const PhaseHeader& header(int peer) const {
    return call_.staging.phase_header(peer, block_.block_idx(), board_.phase() - 1);
  }

 private:
  RINGCOMM_HD void write(PhaseHeader& header) {
    deal(block_, kHeaderWords, [&](int i) { header.header[i] = call_.header[i]; });
    deal(block_, call_.world_size, [&](int i) {
      header.input_bytes[i] = call_.input_bytes[i];
      header.output_bytes[i] = call_.output_bytes[i];
      header.lent_inputs[i] = call_.lent_inputs[i];
    });
    if (block_.thread_idx() != 0) return;
    header.lends = call_.lends;
    header.lent_output = call_.lent_output;
  }

  RINGCOMM_HD bool is_same(int peer, int word) const {
    return header(peer).header[word] == call_.header[word];
  }
  B& block_;
  const KernelCall& call_;
  BlockBoards boards_;
  Board<B, BlockBoards> board_;
};

/// Begins a step of a call that stages its data piece by piece: waits until all ranks have ended
/// the step before, and stages this step's piece. Step 1 compares the headers. If all ranks lend
/// their buffers, nothing is staged from then on.
///
/// `Steps` has staged(step, is_lent), the copies of a step, none `is_lent`; prepare(step, phase),
/// which fills in a step's tables; and compare(), of headers.
template <Block B, class Steps>
RINGCOMM_HD WaitStatus begin_step(B& block, const KernelCall& call, Phases<B>& phases, Steps& steps,
                                  std::uint32_t& step) {
  // A rank that lends its buffers stages nothing and does not read them until it knows whether all
  // ranks lend theirs; if all do, peers write to them from step 1 on.
  bool is_unknown = step <= 1 && phases.lending() == Lending::kUnknown;
  const auto is_lent = [&] { return is_unknown && call.lends == Lends::kYes; };
  HeldVectors<Cached::kNo, Cached::kYes> held;
  held.load(block, steps.staged(step, is_lent()), 0);
  std::byte* region = nullptr;
  if (const WaitStatus stop = phases.open(region, step == 0 && is_unknown);
      stop != WaitStatus::kNone)
    return stop;
  if (step == 1 && is_unknown) {
    if (const WaitStatus stop = steps.compare(); stop != WaitStatus::kNone) return stop;
    if (phases.lending() == Lending::kAll) return WaitStatus::kNone;
    // Some ranks lend their buffers and others do not, so all ranks start again with staging.
    if (phases.lending() == Lending::kSome) {
      is_unknown = false;
      step = 0;
      steps.prepare(step, phases.phase());
      block.sync();
      held.load(block, steps.staged(step, false), 0);
    }
  }
  const CopyList list = steps.staged(step, is_lent());
  held.store(block, list, 0);
  copy_all<Cached::kNo, Cached::kYes>(block, list, kHeldVectors * block.num_threads());
  steps.prepare(step + 1, phases.phase() + 1);
  return WaitStatus::kNone;
}

template <Block B>
RINGCOMM_HD void finish(B& block, const GroupFrame& call, WaitStatus stop) {
  if (stop == WaitStatus::kAborted && block.thread_idx() == 0)
    block.claim(
        call.staging.words(call.rank).is_reported);  // so that later kernels report no consequence
  if (stop != WaitStatus::kNone && stop != WaitStatus::kAborted)
    tell(block, call, static_cast<std::uint32_t>(stop), block.awaited_peer(), FewWords());
}

/// A block's part of a collective. After a failure, peers may arrive before the hosts know. They
/// must not take a later call's data for this one's, so no later kernel of the rank may get past
/// open(): its own cursor is set to a phase that no peer reaches.
template <class Run, Block B, class... Arguments>
RINGCOMM_HD void run_collective(B& block, const KernelCall& call, const Arguments&... arguments) {
  const auto busy = [&]() -> std::uint32_t& {
    return call.staging.busy(call.rank, opaque(block.block_idx()));
  };
  const Claim<B> claim(block, busy());
  Run run(block, call, arguments...);
  claim.check(block, call);
  const WaitStatus stop = run.run();
  finish(block, call, stop);
  if (stop != WaitStatus::kNone && block.thread_idx() == 0)
    call.staging.published(call.rank, call.rank, block.block_idx()).value = ~std::uint64_t{0};
  claim.end(block, busy());
}

}  // namespace ringcomm::cuda

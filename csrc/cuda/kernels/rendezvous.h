#pragma once

#include <cstdint>

#include "core/board_protocol.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/call.h"

// A rendezvous of the ranks of a call: one block of each publishes what its rank has for the
// others, and waits for theirs. The kernels between two rendezvous wait for nobody.

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
/// call on another stream, and would mix their data. False if another one has `busy`, which the
/// caller tells: later, so that other loads overlap with the atomic.
template <Block B>
RINGCOMM_HD bool claim(B& block, std::uint32_t& busy) {
  return block.thread_idx() != 0 || block.claim(busy);
}
template <Block B>
RINGCOMM_HD void end_claim(B& block, std::uint32_t& busy) {
  block.sync();
  if (block.thread_idx() == 0) block.unclaim(busy);
}

/// Of a kernel that has stopped for this reason, if any.
template <Block B>
RINGCOMM_HD void finish(B& block, const GroupFrame& call, WaitStatus stop) {
  if (stop == WaitStatus::kAborted && block.thread_idx() == 0)
    block.claim(
        call.staging.words(call.rank).is_reported);  // so that later kernels report no consequence
  if (stop != WaitStatus::kNone && stop != WaitStatus::kAborted)
    tell(block, call, static_cast<std::uint32_t>(stop), block.awaited_peer(), NoWords());
}

/// Whether all ranks made this call. If not, reports one that did not to the host.
template <Block B>
RINGCOMM_HD WaitStatus compare(B& block, const KernelCall& call) {
  WaitStatus stop = WaitStatus::kNone;
  deal(block, call.world_size * kHeaderWords, [&](int i) {
    const int rank = i / kHeaderWords;
    const CallNotice& theirs = call.staging.notice(rank);
    if (theirs.header[i % kHeaderWords] == call.header[i % kHeaderWords]) return;
    tell_alone(block, call, kMismatch, rank, [&](int word) { return theirs.header[word]; });
    stop = WaitStatus::kAborted;
  });
  return block.agree(stop);
}

/// Publishes this rank's notice and reads the others'.
template <Block B>
RINGCOMM_HD WaitStatus rendezvous(B& block, const KernelCall& call, Board<B, Meeting>& board) {
  // All threads agree: a failed call beside this one may write the phase.
  const auto failed = board.phase() == Staging::kFailed ? WaitStatus::kAborted : WaitStatus::kNone;
  if (const WaitStatus stop = block.agree(failed); stop != WaitStatus::kNone) return stop;
  // Peers have read the notice before this one: close_call() has waited for them.
  CallNotice& mine = call.staging.notice(call.rank);
  deal(block, kHeaderWords, [&](int i) { mine.header[i] = call.header[i]; });
  deal(block, call.world_size, [&](int i) {
    mine.inputs[i] = call.input_places[i];
    mine.outputs[i] = call.output_places[i];
  });
  if (block.thread_idx() == 0) mine.is_staged = call.stages_inputs || call.stages_outputs ? 1 : 0;
  board.publish();
  if (const WaitStatus stop = board.wait_all(); stop != WaitStatus::kNone) return stop;
  if (const WaitStatus stop = compare(block, call); stop != WaitStatus::kNone) return stop;
  CallTable& table = call.staging.table(call.rank);
  WaitStatus staged = WaitStatus::kNone;
  deal(block, call.world_size, [&](int rank) {
    const CallNotice& theirs = call.staging.notice(rank);
    table.inputs[rank] = call.find(theirs.inputs[call.rank], rank);
    table.outputs[rank] = call.find(theirs.outputs[call.rank], rank);
    if (theirs.is_staged != 0) staged = WaitStatus::kAborted;
  });
  const bool is_staged = block.agree(staged) != WaitStatus::kNone;
  if (block.thread_idx() == 0) {
    table.is_whole = is_staged ? 0 : 1;
    table.is_open = 1;
  }
  return WaitStatus::kNone;
}

/// finish() of a kernel of a call that has two rendezvous. After a failure, peers may arrive before
/// the hosts know. They must not take a later call's data for this one's, so no later kernel of the
/// rank may get past its rendezvous: its own cursor is set to a phase that no peer reaches.
template <Block B>
RINGCOMM_HD void finish_call(B& block, const KernelCall& call, WaitStatus stop) {
  finish(block, call, stop);
  if (stop == WaitStatus::kNone || block.thread_idx() != 0) return;
  call.staging.published(call.rank, call.rank).value = Staging::kFailed;
  call.staging.table(call.rank).is_open = 0;
}

/// Whether a launch of a later piece has nothing to do: the first one has done it.
RINGCOMM_HD inline bool is_done(const KernelCall& call) {
  return call.piece_begin > 0 && call.staging.table(call.rank).is_whole != 0;
}

/// The first of the two rendezvous of a call, which are kernels of one block each.
template <Block B>
RINGCOMM_HD void open_call(B& block, const KernelCall& call) {
  if (is_done(call)) return;
  std::uint32_t& busy = call.staging.words(call.rank).is_in_call;
  const bool is_free = claim(block, busy);
  if (block.thread_idx() == 0) call.staging.table(call.rank).is_open = 0;
  Board<B, Meeting> board(block, Meeting(call.staging), call.rank);
  if (!is_free) tell_alone(block, call, kOverlap, call.rank, NoWords());
  const WaitStatus stop = rendezvous(block, call, board);
  finish_call(block, call, stop);
  if (stop != WaitStatus::kNone) end_claim(block, busy);
}

/// Waits until all ranks have ended what is between the two; does nothing after a failure.
template <Block B>
RINGCOMM_HD void close_call(B& block, const KernelCall& call) {
  if (is_done(call) || call.staging.table(call.rank).is_open == 0) return;
  Board<B, Meeting> board(block, Meeting(call.staging), call.rank);
  finish_call(block, call, board.rejoin());
  end_claim(block, call.staging.words(call.rank).is_in_call);
}

}  // namespace ringcomm::cuda

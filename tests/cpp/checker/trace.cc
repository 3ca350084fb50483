#include "machine.h"

namespace ringcomm::checker {
namespace {

const char* text_of(Op op) {
  switch (op) {
    case Op::kLoadAcquire:
      return "load_acquire ";
    case Op::kReadOnce:
      return "read_once ";
    case Op::kLoadSeqCst:
      return "load_seq_cst ";
    case Op::kStoreRelaxed:
      return "store_relaxed (delayed) ";
    case Op::kStoreRelease:
      return "store_release (delayed) ";
    case Op::kStoreSeqCst:
      return "store_seq_cst ";
    case Op::kAdd:
      return "add_seq_cst ";
    case Op::kRead:
      return "read ";
    case Op::kWrite:
      return "write ";
    case Op::kPause:
      return "pause ";
    case Op::kPark:
      return "park ";
    case Op::kParked:
      return "  sleeps on ";
    case Op::kWake:
      return "wake ";
    case Op::kStopped:
      return "stopped(rank ";
    case Op::kCheckpoint:
      return "-- step ";
    case Op::kFlush:
      return "delayed store becomes visible: ";
    case Op::kSliceEnd:
      return "slice of park ends on ";
    case Op::kKill:
      return "** is killed **";
    case Op::kFinish:
      return "-- returns WaitStatus ";
  }
  return "?";
}

std::string text_of_value(Op op, std::uint64_t value) {
  switch (op) {
    case Op::kLoadAcquire:
    case Op::kReadOnce:
    case Op::kLoadSeqCst:
    case Op::kRead:
      return " -> " + std::to_string(value);
    case Op::kAdd:
      return value == 1 ? " += 1" : " -= 1";
    case Op::kPark:
      return " while it is " + std::to_string(value);
    case Op::kWake:
    case Op::kSliceEnd:
    case Op::kKill:
      return "";
    default:
      return " = " + std::to_string(value);
  }
}

}  // namespace

std::string Machine::describe(const Event& event) const {
  const std::string head = "rank " + std::to_string(event.rank) + "  " + text_of(event.op);
  switch (event.op) {
    case Op::kRead:
    case Op::kWrite:
      return head + memory.cell_name(event.idx) + text_of_value(event.op, event.value);
    case Op::kStopped:
      return head + std::to_string(event.idx) + ") -> " + std::to_string(event.value);
    case Op::kCheckpoint:
    case Op::kFinish:
      return head + std::to_string(event.value);
    case Op::kKill:
      return head;
    default:
      return head + memory.word_name(event.idx) + text_of_value(event.op, event.value);
  }
}

}  // namespace ringcomm::checker

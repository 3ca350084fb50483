#include "host/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "host/process.h"
#include "host/thread_pool.h"
#include "host/threads.h"

namespace ringcomm::host {
namespace {

// How long a new record that does not fit, or whose process cannot be reached, may be replaced.
constexpr std::chrono::milliseconds kVerifyTime{1000};

std::string rank_key(int rank) { return "ringcomm/rank/" + std::to_string(rank); }
// Where `rank` says that it reads the record of `peer` and cannot connect to it.
std::string unreachable_key(int rank, int peer) {
  return "ringcomm/unreachable/" + std::to_string(rank) + "/" + std::to_string(peer);
}

// Rank 0's table of all records, so that N ranks need O(N) requests: it reads the records, and the
// others the table.
constexpr const char* kTableKey = "ringcomm/ranks";
// When the others begin to ask about each other as well: rank 0 is late, or has failed.
constexpr std::chrono::milliseconds kFirstGrace{1000};

// How many records of other ranks are read again at a look: rank 0 passes on what it finds, and the
// others read its record and one more.
constexpr int kRecordsAtOnce = 16;

}  // namespace

Rendezvous::Rendezvous(KeyValueStore& store, const GroupTerms& terms,
                       std::chrono::milliseconds timeout)
    : store_(store),
      terms_(terms),
      timeout_(timeout),
      deadline_(deadline_after(timeout)),
      mine_{.host_id = terms.host_id.empty() ? host_id() : terms.host_id,
            .host = host_name(),
            .pid = ::getpid(),
            .options = terms.options,
            .machine_id = machine_id(),
            .world_size = terms.world_size,
            .global_ranks = ranges_of(terms.global_ranks),
            .cores = usable_cores()},
      peers_(static_cast<std::size_t>(terms.world_size)),
      processes_(terms.known),
      warns_at_(terms.log_waits ? began_at_ + kGlooLookInterval : Clock::time_point::max()) {
  processes_.resize(peers_.size());
  processes_[static_cast<std::size_t>(rank())] =
      std::make_shared<PeerProcess>(mine_.pid, mine_.host);
  for (auto& process : processes_)
    if (process == nullptr) process = std::make_shared<PeerProcess>();
}

Rendezvous::~Rendezvous() {
  if (bootstrap_ != nullptr) bootstrap_->withdraw(mine_.memory_key);
}

void Rendezvous::withdraw_record() {
  try {
    if (!is_replaced()) store_.set(rank_key(rank()), "");
  } catch (const std::exception&) {
    // The store is lost, and the group needs it no more.
  }
}

// Empty if the rank has none, or has withdrawn it.
std::string Rendezvous::read_record(int rank) {
  return store_.try_get(rank_key(rank)).value_or("");
}

// Whether another process of this rank has replaced its record.
bool Rendezvous::is_replaced() {
  const std::string text = read_record(rank());
  return !text.empty() && text != peer_of(rank()).text;
}

// Failures of other ranks' earlier attempts have smaller numbers.
void Rendezvous::count_attempts() {
  const std::string text = read_record(rank());
  if (text.empty()) return;
  try {
    mine_.attempt = RankRecord::from_text(text).attempt + 1;
  } catch (const Error&) {
    // Of another version.
  }
}

AbortReason Rendezvous::report_failure(const std::exception& error) {
  if (mine_.failure.text.empty()) mine_.failure = AbortReason::of(error, rank());
  if (has_reported_) return mine_.failure;
  try {
    if (bootstrap_ == nullptr)
      count_attempts();
    else if (is_replaced())
      return mine_.failure;
    mine_.written_ms = time_ms();
    store_.set(rank_key(rank()), mine_.to_text());
    has_reported_ = true;
  } catch (const std::exception&) {
    // The store is lost, and the others notice it themselves.
  }
  return mine_.failure;
}

void Rendezvous::wait_for_all(const std::function<bool(int peer)>& has_come,
                              const std::function<bool()>& has_answer, const char* what) {
  const auto asks_others_at = Clock::now() + (has_answer ? kFirstGrace : kFirstGrace.zero());
  std::deque<int> missing;
  for (int peer = 0; peer < world_size(); ++peer)
    if (peer != rank()) missing.push_back(peer);
  for (Backoff backoff; !missing.empty() && !(has_answer && has_answer());) {
    const auto now = Clock::now();
    const int peer = missing.front();
    missing.pop_front();
    if (now < asks_others_at || !has_come(peer)) {
      missing.push_back(peer);
    } else if (!has_answer) {
      backoff.reset();
      continue;
    }
    // None is named that nobody has asked about.
    if (now >= std::min(deadline_, warns_at_)) std::erase_if(missing, has_come);
    if (missing.empty()) return;
    try {
      look({missing.begin(), missing.end()}, what);
    } catch (const Error&) {
      // Those that have come meanwhile may complete the group, also a dead rank before it ended.
      std::erase_if(missing, has_come);
      if (!missing.empty()) throw;
    }
    if (std::exchange(has_news_, false)) backoff.reset();  // its process answers in a moment
    backoff.sleep();
  }
}

PeerTable Rendezvous::find_ranks() {
  count_attempts();
  bootstrap_ = &Bootstrap::instance();
  mine_.bootstrap_address = bootstrap_->address();
  mine_.memory_key = random_text();
  mine_.written_ms = time_ms();
  // Before rank 0, or a rank that rank 0 compares with itself, can see this one: of the two, at
  // least one finds the other's record new.
  for (int peer = 0; peer < (rank() == 0 ? world_size() : 1); ++peer)
    peer_of(peer).first_text = read_record(peer);
  peer_of(rank()) = {.text = mine_.to_text(), .record = mine_};
  store_.set(rank_key(rank()), mine_.to_text());
  const bool has_table = world_size() > 2;
  const auto has_come = [this](int peer) { return is_found(peer) || find(peer); };
  std::function<bool()> has_answer;
  if (has_table && rank() != 0)
    has_answer = [&] {
      if (read_table()) return true;
      has_come(0);  // a failure of rank 0 is in its record
      return false;
    };
  wait_for_all(has_come, has_answer);
  if (has_table && rank() == 0) {
    std::string table;
    for (const Peer& peer : peers_) table += to_fields({peer.text});
    store_.set(kTableKey, table);
  }
  std::vector<RankRecord> records;
  for (const Peer& peer : peers_) records.push_back(peer.record);
  return PeerTable(records);
}

// Whether all ranks of the table have been found; not in one that is older than this rank's record.
bool Rendezvous::read_table() {
  const auto text = store_.try_get(kTableKey);
  if (!text) return false;
  std::vector<std::string> records;
  TextFields fields(*text);
  for (int peer = 0; peer < world_size(); ++peer) records.push_back(fields.next());
  if (records[static_cast<std::size_t>(rank())] != peer_of(rank()).text) return false;
  bool has_all = true;
  for (int peer = 0; peer < world_size(); ++peer)
    if (peer != rank() && !accept(peer, records[static_cast<std::size_t>(peer)])) has_all = false;
  return has_all;
}

std::string Rendezvous::key_of(int rank) {
  find(rank);
  return peer_of(rank).record.memory_key;
}

SharedMemory Rendezvous::share_memory(const std::vector<int>& ranks, std::size_t num_bytes) {
  sharing_ = ranks;
  memory_key_ = mine_.memory_key;
  if (rank() != ranks.front()) return fetch_memory(ranks.front(), num_bytes);
  UniqueFd fd = create_memfd(num_bytes);
  SharedMemory memory(fd.get(), num_bytes);
  if (ranks.size() > 1) bootstrap_->offer(mine_.memory_key, std::move(fd));
  return memory;
}

SharedMemory Rendezvous::fetch_memory(int leader, std::size_t num_bytes) {
  const char* const what = "did not send the shared-memory descriptor";
  const auto look_at_leader = [&] {
    if (has_died(leader)) throw_died(leader);
    check_time({leader}, what);
  };
  for (Backoff backoff;; backoff.sleep()) {
    if (!find(leader)) {  // it had died, and its new record is not confirmed yet
      check_time({leader}, what);
      continue;
    }
    const RankRecord record = peer_of(leader).record;  // which look_at_leader() may replace
    UniqueFd fd;
    try {
      fd = bootstrap_->fetch(record.bootstrap_address, record.memory_key, timeout_, look_at_leader);
    } catch (const Refused& refused) {
      fail(ErrorKind::kSystem, leader, name_of(leader) + " " + refused.why);
    }
    if (fd) {
      SharedMemory memory = SharedMemory::of_peer(fd.get());
      memory_key_ = record.memory_key;
      if (memory.num_bytes() == num_bytes) return memory;
      throw Error({.kind = ErrorKind::kMismatch, .rank = leader, .op = "init"},
                  "ringcomm: the group's shared memory does not have the size that this rank "
                  "expects");
    }
    // The leader has yet to find all ranks, or its record is of an earlier group.
    look({leader}, what);
  }
}

void Rendezvous::look(const std::vector<int>& missing, const std::string& what) {
  // Of a rank that has no record yet another group may know that it has ended.
  for (int peer = 0; peer < world_size(); ++peer)
    if (is_found(peer) ? has_died(peer) : process_of(peer).is_dead.load()) throw_died(peer);
  check_time(missing, what);
}

// Whether a rank that was found has ended, and no other process has replaced it.
bool Rendezvous::has_died(int peer) {
  return process_of(peer).is_dead && find(peer) && process_of(peer).is_dead;
}

// Reads the record of `peer` if it is there. False when it is not, or does not fit yet.
bool Rendezvous::find(int peer) { return accept(peer, read_record(peer)); }

// The same of the record `text`.
bool Rendezvous::accept(int peer, const std::string& text) {
  Peer& known = peer_of(peer);
  if (!known.first_text) known.first_text = text;
  if (text.empty()) return false;
  if (text == known.text) return true;
  if (text != known.unverified_text) {
    known.unverified_text = text;
    known.unverified_since = Clock::now();
    has_news_ = true;
  }
  const bool is_settled = Clock::now() >= std::min(deadline_, known.unverified_since + kVerifyTime);
  RankRecord theirs;
  bool is_expected = true;
  try {
    theirs = RankRecord::from_text(text);
    is_expected =
        expected_keys_.empty() || expected_keys_.find(theirs.memory_key) != std::string::npos;
    const bool may_join = theirs.failure.text.empty() && is_expected;
    check_same_group(mine_, rank(), theirs, peer, may_join, terms_.is_one_host);
    if (may_join) {
      auto process = find_process(theirs, peer, is_settled && is_current(theirs, text, peer));
      if (process == nullptr) return false;
      processes_[static_cast<std::size_t>(peer)] = std::move(process);
      known.text = text;
      known.record = std::move(theirs);
      return true;
    }
  } catch (const Error& error) {
    const ErrorInfo& info = error.info();
    // What this process cannot do, as without descriptors, is no matter of the record.
    const bool is_own = info.kind == ErrorKind::kSystem && info.rank < 0 && info.pid < 0;
    if (is_own || (is_settled && text != known.first_text)) throw;
    known.record.failure.text = error.what();
    return false;
  }
  if (!is_expected && theirs.failure.text.empty())
    fail(ErrorKind::kAborted, peer, name_of(peer) + " has failed and makes the group again");
  known.record.failure = theirs.failure;
  if (!is_current(theirs, text, peer)) return false;
  if (!is_found(peer))
    processes_[static_cast<std::size_t>(peer)] =
        std::make_shared<PeerProcess>(theirs.pid, theirs.host);
  throw_reported(theirs.failure);
}

// Whether a failure, or the end of its process, is of this attempt to make the group. What was not
// there when this rank looked first is. Else ranks count their attempts; what was written before
// this process began is of an earlier one, and so is that a rank had waited for too long.
bool Rendezvous::is_current(const RankRecord& theirs, const std::string& text, int peer) const {
  return text != peer_of(peer).first_text ||
         (theirs.attempt >= mine_.attempt && theirs.written_ms >= start_of_process_ms() &&
          theirs.failure.kind != ErrorKind::kTimeout);
}

void Rendezvous::look_for_failures() {
  if (Clock::now() < next_look_) return;
  next_look_ = Clock::now() + kCheckInterval;
  if (rank() != 0 && is_found(0)) find(0);
  for (int i = 0; i < std::min(rank() == 0 ? kRecordsAtOnce : 1, world_size()); ++i) {
    next_looked_at_ = (next_looked_at_ + 1) % world_size();
    if (next_looked_at_ != rank() && is_found(next_looked_at_)) find(next_looked_at_);
  }
}

// Once, on the first rank that is there, and because of Gloo on all and sooner.
void Rendezvous::warn_of_missing(const std::vector<int>& missing, const std::string& what) {
  const auto now = Clock::now();
  if (now < warns_at_) return;
  const std::string gloo = gloo_text(missing);
  warns_at_ = now + kGlooLookInterval;
  if (gloo.empty() && now < began_at_ + kWarnAfter) return;
  warns_at_ = Clock::time_point::max();
  const auto waited = std::chrono::duration_cast<std::chrono::seconds>(now - began_at_);
  const auto num_lower = std::ranges::lower_bound(missing, rank()) - missing.begin();
  if (gloo.empty() && num_lower < rank()) return;
  say_aside(prefix_of(rank(), world_size(), global_rank_of(rank())) + listed(missing) + " " + what +
            " in " + std::to_string(waited.count()) + " s; the group is still being made" + gloo +
            "\n");
}

// Which missing ranks have a key of Gloo: it is of an earlier group if this rank has one as well.
std::string Rendezvous::gloo_text(std::vector<int> missing) {
  const auto has_key = [this](int rank) { return store_.try_get("0/" + std::to_string(rank)); };
  std::erase_if(missing, [&](int peer) { return is_found(peer) || !has_key(peer); });
  if (missing.empty() || has_key(rank())) return "";
  return "; " + listed(missing) +
         " made a Gloo group instead, unless an earlier one has left its keys: name one backend, "
         "with RINGCOMM_AS_GLOO=1 on all ranks (TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns it off)";
}

int Rendezvous::global_rank_of(int rank) const {
  const auto idx = static_cast<std::size_t>(rank);
  return idx < terms_.global_ranks.size() ? static_cast<int>(terms_.global_ranks[idx]) : -1;
}

// Watches the process of a record, if it is on this machine. Null if it has not answered yet, so
// that a rank that is out of descriptors later can tell those that have found it; or had ended
// before, and its record is not trusted.
std::shared_ptr<PeerProcess> Rendezvous::find_process(const RankRecord& theirs, int peer,
                                                      bool is_trusted) {
  // Abstract sockets must reach the peer also if the user declares that memory is shared.
  const bool can_watch = theirs.machine_id == mine_.machine_id ||
                         (terms_.shares_memory && theirs.host_id == mine_.host_id);
  if (can_watch)
    if (auto process = bootstrap_->watch(theirs.bootstrap_address, theirs.pid, theirs.host)) {
      if (const std::string why = process->refusal(); !why.empty() && !process->has_answered)
        fail(ErrorKind::kSystem, peer, name_of(peer) + " " + why);
      if (process->has_answered) return process;
      peer_of(peer).unanswered = std::move(process);
      return nullptr;
    }
  // It was there when this rank connected to it.
  if (const auto& before = peer_of(peer).unanswered;
      before != nullptr && before->bootstrap_address == theirs.bootstrap_address &&
      !before->is_stranger) {
    if (!before->is_dead) before->end(-1);
    return before;
  }
  auto process = std::make_shared<PeerProcess>(theirs.pid, theirs.host);
  if (!can_watch) return process;

  store_.set(unreachable_key(rank(), peer), theirs.bootstrap_address);
  // Where the peer has read this rank's address, which is random, and cannot connect to it either,
  // sockets do not reach it, whatever the machines' names.
  if (store_.try_get(unreachable_key(peer, rank())) == mine_.bootstrap_address) {
    if (theirs.host_id != mine_.host_id) return process;
    fail(ErrorKind::kSystem, peer,
         "rank " + std::to_string(peer) + " (on " + theirs.host +
             ") has the host identity of this rank (on " + mine_.host + "), " + mine_.host_id +
             ", but is on another machine, as after a start from copies of one memory image; set "
             "RINGCOMM_HOST_ID to another value on each machine");
  }
  if (!is_trusted && (is_found(peer) || !process_of(peer).is_dead)) return nullptr;
  process->is_dead = true;
  return process;
}

void Rendezvous::check_time(std::vector<int> missing, const std::string& what) {
  if (store_.is_interrupted())
    fail(ErrorKind::kInterrupted, rank(), "interrupted by a signal while the group was made");
  look_for_failures();
  for (int peer = 0; peer < world_size(); ++peer)
    if (const std::string why = process_of(peer).refusal(); is_found(peer) && !why.empty())
      fail(ErrorKind::kSystem, peer, name_of(peer) + " " + why);
  if (const std::string why = bootstrap_->refusal(); !why.empty())
    fail(ErrorKind::kSystem, rank(), "this process " + why);
  // Ranks of one host may share their memory while one of another host cannot join any more.
  for (int other = 0; !sharing_.empty() && other < world_size(); ++other)
    if (!std::binary_search(sharing_.begin(), sharing_.end(), other) && has_died(other))
      throw_died(other);
  std::sort(missing.begin(), missing.end());
  warn_of_missing(missing, what);
  if (Clock::now() < deadline_) return;
  const std::string after =
      listed(missing) + " " + what + " in " + std::to_string(timeout_.count()) + " ms";
  // The rank waited for may itself wait for that one, in another group.
  for (int stopped = 0; stopped < world_size(); ++stopped)
    if (process_of(stopped).is_stopped())
      fail(ErrorKind::kTimeout, stopped,
           after + ", and the process of " + name_of(stopped) + " is stopped");
  if (is_replaced())
    fail(ErrorKind::kTimeout, missing.front(),
         after + "; another process joined as rank " + std::to_string(rank()) +
             " too: give each process a rank of its own");
  const std::string& failure = peer_of(missing.front()).record.failure.text;
  fail(ErrorKind::kTimeout, missing.front(),
       after + "; start " + std::to_string(world_size()) +
           " ranks, read the errors of the missing ones, or raise the group's timeout" +
           gloo_text(missing) +
           (failure.empty() ? "" : "; its record, perhaps of an earlier attempt: " + failure));
}

void Rendezvous::throw_died(int peer) {
  if (is_found(peer)) find(peer);  // throws if it had failed before
  fail(ErrorKind::kPeerDied, peer,
       name_of(peer) + process_of(peer).how_it_ended(" while the group was made", {}));
}

void Rendezvous::throw_reported(const AbortReason& reason) {
  mine_.failure = reason;  // who reads this rank's record learns of the same
  // A faulty peer may have written any number.
  const auto is_rank = [this](int rank) { return rank >= 0 && rank < world_size(); };
  fail(reason.kind, is_rank(reason.culprit) ? reason.culprit : -1,
       (is_rank(reason.origin) ? name_of(reason.origin) : "a rank") + " failed: " + reason.text);
}

void Rendezvous::fail(ErrorKind kind, int peer, const std::string& text) const {
  ErrorInfo info{.kind = kind, .rank = peer, .op = "init"};
  if (peer >= 0) {
    info.pid = process_of(peer).pid;
    info.host = process_of(peer).host;
  }
  throw Error(info, prefix_of(rank(), world_size(), global_rank_of(rank())) + text);
}

}  // namespace ringcomm::host

#pragma once

// Messages between threads of one process, for tests: late, overtaking each other between tags, and
// read from the sender's buffer only when they are delivered. A send ends with its receive, as
// Gloo's does. Ranks can die, or be stopped at the n-th message that they start.
//
// An abort is as slow as Gloo's: first the waits end, then a hook runs, and only when abort()
// returns does the network let go of messages that were destroyed meanwhile. Whatever it lets go of
// before it was delivered it uses once more, as a late peer would: AddressSanitizer sees buffers
// that were freed too early.
//
// Ranks as threads that believe to be on several hosts: real shared memory inside one, messages in
// memory between them. A text places them: each letter is a rank, and names its host. So "aaa" is
// shared memory alone, "abc" messages alone, and "aab" both.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "third_party/doctest/doctest.h"
#include "thread_ranks.h"
#include "transport/messages/exchange.h"
#include "transport/transport.h"

namespace ringcomm::testing {

/// Connects the ranks; outlives their messengers.
class MemoryNetwork {
 public:
  using Clock = std::chrono::steady_clock;

  explicit MemoryNetwork(int world_size, std::chrono::microseconds max_delay = {},
                         unsigned seed = 1)
      : world_size_(world_size),
        max_delay_(max_delay),
        random_(seed),
        is_gone_(static_cast<std::size_t>(world_size)),
        is_aborting_(static_cast<std::size_t>(world_size)),
        deliverer_([this] { deliver(); }) {}
  ~MemoryNetwork() {
    {
      const std::lock_guard lock(mutex_);
      is_stopping_ = true;
    }
    changed_.notify_all();
    deliverer_.join();
  }
  MemoryNetwork(const MemoryNetwork&) = delete;
  MemoryNetwork& operator=(const MemoryNetwork&) = delete;

  std::unique_ptr<Messenger> join(int rank) { return std::make_unique<End>(*this, rank); }

  /// Simulates the end of the rank's process: messages in flight from or to it fail.
  void kill(int rank) {
    const std::lock_guard lock(mutex_);
    leave(rank);
  }

  /// Called in every abort(), between the end of the waits and that of the messages. Set before the
  /// ranks start.
  void on_abort(std::function<void(int rank)> hook) { on_abort_ = std::move(hook); }
  /// Called before a rank starts a message, with the number of those before it; likewise.
  void on_start(std::function<void(int rank, int num_started)> hook) {
    on_start_ = std::move(hook);
  }

  /// Messages that met a receive without room for them, with which a messenger may crash, or one of
  /// another size where the receiver knows it: an envelope alone may be shorter than its receive.
  int num_misfits() const {
    const std::lock_guard lock(mutex_);
    return num_misfits_;
  }
  /// Bytes delivered from a rank, envelopes included.
  std::uint64_t delivered_bytes(int from) const {
    const std::lock_guard lock(mutex_);
    std::uint64_t bytes = 0;
    for (const auto& [rank, num_bytes] : delivered_)
      if (rank == from) bytes += num_bytes;
    return bytes;
  }

 private:
  // One side of a message. Everything is guarded by the network's mutex.
  struct Post {
    int owner = -1;
    int from = -1;
    int to = -1;
    int tag = 0;
    std::byte* data = nullptr;
    std::size_t num_bytes = 0;
    bool is_send = false;
    bool is_over = false;
    bool is_aborted = false;    // waits have ended, and the buffer is used until `is_over`
    bool is_destroyed = false;  // during the abort
    MessageEnd end = MessageEnd::kDone;
    std::shared_ptr<Post> partner = {};
    Clock::time_point due = {};
  };
  using PostPtr = std::shared_ptr<Post>;

  class End;
  class MemoryMessage final : public ringcomm::Message {
   public:
    MemoryMessage(MemoryNetwork& network, PostPtr post)
        : network_(network), post_(std::move(post)) {}
    ~MemoryMessage() override {
      const std::lock_guard lock(network_.mutex_);
      if (post_->is_over) return;
      if (!post_->is_aborted)
        std::abort();  // its buffer may be freed, and the network would use it
      post_->is_destroyed = true;
      if (!network_.is_aborting_[static_cast<std::size_t>(post_->owner)]) network_.let_go(*post_);
    }
    MessageEnd wait() override {
      std::unique_lock lock(network_.mutex_);
      network_.changed_.wait(lock, [this] { return post_->is_over || post_->is_aborted; });
      return post_->is_over ? post_->end : MessageEnd::kAborted;
    }
    int source() const override { return post_->from; }
    const std::string& failure() const override {
      static const std::string text = "connection closed";
      return text;
    }

   private:
    MemoryNetwork& network_;
    PostPtr post_;
  };

  class End final : public Messenger {
   public:
    End(MemoryNetwork& network, int rank) : network_(network), rank_(rank) {}
    ~End() override {
      const std::lock_guard lock(network_.mutex_);
      network_.leave(rank_);
    }
    int rank() const override { return rank_; }
    int world_size() const override { return network_.world_size_; }
    bool announces_receives() const override { return true; }
    MessagePtr isend(int peer, int tag, const std::byte* data, std::size_t num_bytes) override {
      return start({.owner = rank_,
                    .from = rank_,
                    .to = peer,
                    .tag = tag,
                    .data = const_cast<std::byte*>(data),
                    .num_bytes = num_bytes,
                    .is_send = true});
    }
    MessagePtr irecv(int peer, int tag, std::byte* data, std::size_t num_bytes) override {
      return start({.owner = rank_,
                    .from = peer,
                    .to = rank_,
                    .tag = tag,
                    .data = data,
                    .num_bytes = num_bytes});
    }

   private:
    void end_messages() noexcept override {
      {
        const std::lock_guard lock(network_.mutex_);
        is_aborted_ = true;
        network_.begin_abort(rank_);
      }
      if (network_.on_abort_) network_.on_abort_(rank_);
      const std::lock_guard lock(network_.mutex_);
      network_.end_abort(rank_);
    }

    MessagePtr start(Post post) {
      if (network_.on_start_) network_.on_start_(rank_, num_started_++);
      const std::lock_guard lock(network_.mutex_);
      const auto posted = std::make_shared<Post>(std::move(post));
      if (is_aborted_)
        network_.end(*posted, MessageEnd::kAborted);
      else
        network_.add(posted);
      return std::make_unique<MemoryMessage>(network_, posted);
    }

    MemoryNetwork& network_;
    int rank_;
    bool is_aborted_ = false;
    std::atomic<int> num_started_ = 0;
  };

  bool fit(const Post& send, const Post& recv) const {
    return send.is_send && !recv.is_send && send.to == recv.to && send.tag == recv.tag &&
           (recv.from < 0 || recv.from == send.from) && is_open(send) && is_open(recv);
  }
  // An abort that has returned has closed the connections. Its messages are destroyed one by one,
  // and what is sent to the first of them must not reach the second.
  bool is_open(const Post& post) const {
    return !post.is_aborted || is_aborting_[static_cast<std::size_t>(post.owner)];
  }

  void add(const PostPtr& post) {
    const int peer = post->is_send ? post->to : post->from;
    if (peer >= 0 && is_gone_[static_cast<std::size_t>(peer)]) {
      end(*post, MessageEnd::kFailed);
      return;
    }
    for (const PostPtr& other : waiting_) {
      if (!(post->is_send ? fit(*post, *other) : fit(*other, *post))) continue;
      match(post, other);
      waiting_.remove(PostPtr(other));
      return;
    }
    waiting_.push_back(post);
  }

  void match(const PostPtr& post, const PostPtr& other) {
    const PostPtr& send = post->is_send ? post : other;
    const PostPtr& recv = post->is_send ? other : post;
    recv->from = send->from;
    send->partner = recv;
    const int tag = send->tag;
    const bool is_envelope = tag <= MessageTags::kEnvelope ||
                             (tag >= MessageTags::kFirstInternal && tag < MessageTags::kFirstSized);
    const bool fits =
        is_envelope ? send->num_bytes <= recv->num_bytes : send->num_bytes == recv->num_bytes;
    if (!fits) ++num_misfits_;
    const auto delay = max_delay_.count() == 0
                           ? 0
                           : static_cast<std::int64_t>(random_()) % (max_delay_.count() + 1);
    send->due = Clock::now() + std::chrono::microseconds(delay);
    matched_.push_back(send);
    changed_.notify_all();
  }

  void end(Post& post, MessageEnd how) {
    if (post.is_over) return;
    post.is_over = true;
    post.end = how;
    changed_.notify_all();
  }

  void end_all(const std::function<bool(const Post&)>& is_meant, MessageEnd how) {
    for (std::list<PostPtr>* posts : {&waiting_, &stranded_})
      posts->remove_if([&](const PostPtr& post) {
        if (is_meant(*post)) end(*post, how);
        return post->is_over;
      });
    // The other side of a message in flight keeps waiting until this one leaves.
    for (const PostPtr& send : matched_)
      for (Post* post : {send.get(), send->partner.get()})
        if (is_meant(*post)) end(*post, how);
  }

  template <class Body>
  void for_each_post(const Body& body) {
    for (const std::list<PostPtr>* posts : {&waiting_, &stranded_})
      for (const PostPtr& post : *posts) body(*post);
    for (const PostPtr& send : matched_) {
      body(*send);
      body(*send->partner);
    }
  }

  // Ends the waits of a rank, and no more.
  void begin_abort(int rank) {
    is_aborting_[static_cast<std::size_t>(rank)] = true;
    for_each_post([rank](Post& post) { post.is_aborted |= post.owner == rank && !post.is_over; });
    changed_.notify_all();
  }

  // Lets go of those messages that were destroyed since.
  void end_abort(int rank) {
    is_aborting_[static_cast<std::size_t>(rank)] = false;
    std::vector<Post*> destroyed;
    for_each_post([&](Post& post) {
      if (post.owner == rank && post.is_destroyed && !post.is_over) destroyed.push_back(&post);
    });
    for (Post* post : destroyed) let_go(*post);
  }

  // A last use of the buffer, as by a peer that was faster than this rank; then none any more.
  void let_go(Post& post) {
    for (std::size_t i = 0; i < post.num_bytes; ++i)
      if (post.is_send)
        last_read_ = post.data[i];
      else
        post.data[i] = std::byte{0xdd};
    end_all([&post](const Post& other) { return &other == &post; }, MessageEnd::kAborted);
  }

  void leave(int rank) {
    is_gone_[static_cast<std::size_t>(rank)] = true;
    end_all([rank](const Post& post) { return post.from == rank || post.to == rank; },
            MessageEnd::kFailed);
  }

  void deliver() {
    std::unique_lock lock(mutex_);
    while (!is_stopping_) {
      auto next = matched_.end();
      for (auto send = matched_.begin(); send != matched_.end(); ++send)
        if (next == matched_.end() || (*send)->due < (*next)->due) next = send;
      if (next == matched_.end()) {
        changed_.wait(lock);
      } else if (Clock::now() < (*next)->due) {
        const Clock::time_point due = (*next)->due;
        changed_.wait_until(lock, due);
      } else {
        const PostPtr send = *next;
        matched_.erase(next);
        arrive(send, send->partner);
      }
    }
  }

  void arrive(const PostPtr& send, const PostPtr& recv) {
    if (send->is_over || recv->is_over) {  // the other side waits until the failed one leaves
      for (const PostPtr& post : {send, recv})
        if (!post->is_over) stranded_.push_back(post);
      return;
    }
    if (send->num_bytes <= recv->num_bytes && send->num_bytes > 0)
      std::memcpy(recv->data, send->data, send->num_bytes);
    delivered_.emplace_back(send->from, send->num_bytes);
    end(*send, MessageEnd::kDone);
    end(*recv, MessageEnd::kDone);
  }

  int world_size_;
  std::chrono::microseconds max_delay_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937 random_;
  std::vector<bool> is_gone_;
  std::vector<bool> is_aborting_;  // by rank
  std::function<void(int)> on_abort_;
  std::function<void(int, int)> on_start_;
  std::list<PostPtr> waiting_;
  std::list<PostPtr> matched_;   // the sends
  std::list<PostPtr> stranded_;  // matched with one that was aborted
  std::vector<std::pair<int, std::uint64_t>> delivered_;
  int num_misfits_ = 0;
  volatile std::byte last_read_ = {};
  bool is_stopping_ = false;
  std::thread deliverer_;  // last: it uses the rest
};

/// A rank of a group that is placed so.
inline std::unique_ptr<Communicator> make_placed(KeyValueStore& store, MemoryNetwork& network,
                                                 const std::string& placement, int rank,
                                                 CommunicatorOptions options = {}) {
  options.host_id = placement[static_cast<std::size_t>(rank)];
  return std::make_unique<Communicator>(
      store, rank, static_cast<int>(placement.size()), options, kBound,
      [&network, rank](const std::string&, const LookForRanks&) { return network.join(rank); });
}

/// Runs body(communicator) on one thread per rank.
inline void run_placed(MemoryNetwork& network, const std::string& placement,
                       const std::function<void(Communicator&)>& body,
                       const CommunicatorOptions& options = {}) {
  MemoryStore store;
  run_threads(static_cast<int>(placement.size()),
              [&](int rank) { body(*make_placed(store, network, placement, rank, options)); });
}

/// The same on a network of its own, where every message must fit its receive.
inline void run_placed(const std::string& placement, const std::function<void(Communicator&)>& body,
                       const CommunicatorOptions& options = {},
                       std::chrono::microseconds max_delay = {}) {
  CAPTURE(placement);
  MemoryNetwork network(static_cast<int>(placement.size()), max_delay);
  run_placed(network, placement, body, options);
  CHECK(network.num_misfits() == 0);
}

}  // namespace ringcomm::testing

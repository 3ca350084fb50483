#pragma once

// Messages between processes of this machine, for tests that end one of them: over socket pairs
// that are there before the processes are. As Gloo's, a connection outlives exec() in its process.

#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/annotations.h"
#include "transport/transport.h"

namespace ringcomm::testing {

/// A connection between each two of some processes; made by the process that forks them.
class SocketMesh {
 public:
  explicit SocketMesh(int world_size) : ends_(static_cast<std::size_t>(world_size)) {
    for (auto& ends : ends_) ends.assign(static_cast<std::size_t>(world_size), -1);
    for (std::size_t a = 0; a < ends_.size(); ++a)
      for (std::size_t b = 0; b < a; ++b) {
        std::array<int, 2> pair = {-1, -1};
        if (::socketpair(AF_UNIX, SOCK_STREAM, 0, pair.data()) != 0) std::abort();
        ends_[a][b] = pair[0];
        ends_[b][a] = pair[1];
      }
  }
  ~SocketMesh() { close_all(-1); }
  SocketMesh(const SocketMesh&) = delete;
  SocketMesh& operator=(const SocketMesh&) = delete;

  /// The ends of `rank`, by peer. The others are closed in this process.
  std::vector<int> take(int rank) {
    close_all(rank);
    return std::move(ends_[static_cast<std::size_t>(rank)]);
  }

 private:
  void close_all(int except) {
    for (std::size_t rank = 0; rank < ends_.size(); ++rank)
      for (int& fd : ends_[rank])
        if (static_cast<int>(rank) != except && fd >= 0) ::close(std::exchange(fd, -1));
  }

  std::vector<std::vector<int>> ends_;
};

class SocketMessages final : public Messenger {
 public:
  SocketMessages(int rank, const std::vector<int>& sockets) : rank_(rank), peers_(sockets.size()) {
    for (std::size_t i = 0; i < sockets.size(); ++i) {
      Peer& peer = peers_[i];
      peer.socket = sockets[i];
      if (peer.socket < 0) continue;
      peer.reader = std::thread([this, &peer] { read(peer); });
      peer.writer = std::thread([this, &peer] { write(peer); });
    }
  }
  ~SocketMessages() override {
    abort();
    for (Peer& peer : peers_)
      if (peer.socket >= 0) ::close(peer.socket);
  }

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(peers_.size()); }
  bool announces_receives() const override { return true; }
  MessagePtr isend(int peer, int tag, const std::byte* data, std::size_t num_bytes) override {
    RINGCOMM_STEP("before a message is sent");
    return start(peer, true, {.tag = tag, .num_bytes = num_bytes}, const_cast<std::byte*>(data));
  }
  MessagePtr irecv(int peer, int tag, std::byte* data, std::size_t num_bytes) override {
    if (peer == kAnySource) throw Unsupported("a source is needed");
    return start(peer, false, {.tag = tag, .num_bytes = num_bytes}, data);
  }

 private:
  struct Head {
    int tag = 0;
    std::size_t num_bytes = 0;
  };
  // Guarded by the mutex, except the bytes of a send. They are a copy, because later writes to the
  // sender's buffer are ordered after them through other processes only, which ThreadSanitizer does
  // not see.
  struct Post {
    Head head;
    std::byte* data = nullptr;
    std::vector<std::byte> sent = {};
    int source = -1;
    bool is_over = false;
    MessageEnd end = MessageEnd::kDone;
  };
  using PostPtr = std::shared_ptr<Post>;
  struct Peer {
    int socket = -1;
    bool is_gone = false;
    std::deque<PostPtr> sends;
    std::list<PostPtr> receives;
    std::map<int, std::deque<std::vector<std::byte>>> arrived;  // by tag
    std::thread reader, writer;
  };

  class SocketMessage final : public ringcomm::Message {
   public:
    SocketMessage(SocketMessages& owner, PostPtr post) : owner_(owner), post_(std::move(post)) {}
    MessageEnd wait() override {
      std::unique_lock lock(owner_.mutex_);
      owner_.changed_.wait(lock, [this] { return post_->is_over; });
      return post_->end;
    }
    int source() const override { return post_->source; }
    const std::string& failure() const override {
      static const std::string text = "connection closed";
      return text;
    }

   private:
    SocketMessages& owner_;
    PostPtr post_;
  };

  MessagePtr start(int to, bool is_send, const Head& head, std::byte* data) {
    const std::lock_guard lock(mutex_);
    Peer& peer = peers_[static_cast<std::size_t>(to)];
    auto post = std::make_shared<Post>(Post{.head = head, .data = data, .source = to});
    const auto arrived = peer.arrived.find(head.tag);
    if (!is_send && arrived != peer.arrived.end() && !arrived->second.empty()) {
      receive(*post, arrived->second.front());
      arrived->second.pop_front();
    } else if (is_aborted_ || peer.is_gone) {
      end(*post, is_aborted_ ? MessageEnd::kAborted : MessageEnd::kFailed);
    } else if (is_send) {
      post->sent.assign(data, data + head.num_bytes);
      peer.sends.push_back(post);
    } else {
      peer.receives.push_back(post);
    }
    changed_.notify_all();
    return std::make_unique<SocketMessage>(*this, std::move(post));
  }

  void end(Post& post, MessageEnd how) {
    if (std::exchange(post.is_over, true)) return;
    post.end = how;
    changed_.notify_all();
  }

  void receive(Post& post, const std::vector<std::byte>& bytes) {
    if (bytes.size() > post.head.num_bytes) std::abort();  // envelopes are there to prevent it
    if (!bytes.empty()) std::memcpy(post.data, bytes.data(), bytes.size());
    end(post, MessageEnd::kDone);
  }

  void end_all(Peer& peer, MessageEnd how) {
    peer.is_gone = true;
    for (const PostPtr& post : peer.sends) end(*post, how);
    for (const PostPtr& post : peer.receives) end(*post, how);
    peer.sends.clear();
    peer.receives.clear();
    changed_.notify_all();
  }

  static bool read_all(int socket, void* data, std::size_t num_bytes) {
    return num_bytes == 0 ||
           ::recv(socket, data, num_bytes, MSG_WAITALL) == static_cast<ssize_t>(num_bytes);
  }
  static bool write_all(int socket, const void* data, std::size_t num_bytes) {
    const auto* from = static_cast<const std::byte*>(data);
    while (num_bytes > 0) {
      const ssize_t written = ::send(socket, from, num_bytes, MSG_NOSIGNAL);
      if (written <= 0) return false;
      from += written;
      num_bytes -= static_cast<std::size_t>(written);
    }
    return true;
  }

  void read(Peer& peer) {
    for (;;) {
      Head head;
      std::vector<std::byte> bytes;
      bool is_read = read_all(peer.socket, &head, sizeof(head));
      if (is_read) {
        bytes.resize(head.num_bytes);
        is_read = read_all(peer.socket, bytes.data(), bytes.size());
      }
      if (is_read) RINGCOMM_STEP("after a message has arrived");
      const std::lock_guard lock(mutex_);
      if (!is_read) return end_all(peer, MessageEnd::kFailed);
      auto found = peer.receives.begin();
      while (found != peer.receives.end() && (*found)->head.tag != head.tag) ++found;
      if (found == peer.receives.end()) {
        peer.arrived[head.tag].push_back(std::move(bytes));
        continue;
      }
      receive(**found, bytes);
      peer.receives.erase(found);
    }
  }

  void write(Peer& peer) {
    for (;;) {
      PostPtr post;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return peer.is_gone || !peer.sends.empty(); });
        if (peer.is_gone) return;
        post = peer.sends.front();
        peer.sends.pop_front();
      }
      bool is_written = write_all(peer.socket, &post->head, sizeof(post->head));
      RINGCOMM_STEP("in the middle of a message");
      is_written = is_written && write_all(peer.socket, post->sent.data(), post->sent.size());
      const std::lock_guard lock(mutex_);
      end(*post, is_written ? MessageEnd::kDone
                            : (is_aborted_ ? MessageEnd::kAborted : MessageEnd::kFailed));
    }
  }

  void end_messages() noexcept override {
    {
      const std::lock_guard lock(mutex_);
      is_aborted_ = true;
      for (Peer& peer : peers_) end_all(peer, MessageEnd::kAborted);
    }
    for (Peer& peer : peers_)
      if (peer.socket >= 0) ::shutdown(peer.socket, SHUT_RDWR);
    for (Peer& peer : peers_)
      for (std::thread* thread : {&peer.reader, &peer.writer})
        if (thread->joinable()) thread->join();
  }

  int rank_;
  std::vector<Peer> peers_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_aborted_ = false;
};

}  // namespace ringcomm::testing

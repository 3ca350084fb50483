#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

namespace ringcomm {

/// How the wait for a message ended.
enum class [[nodiscard]] MessageEnd : std::uint8_t {
  kDone,     ///< sent and no longer read, or received
  kAborted,  ///< abort() was called
  kFailed,   ///< the connection to the peer is gone; Message::failure() has the transport's words
};

/// A send or a receive on its way.
class Message {
 public:
  /// Returns when the transport no longer uses the message's buffer. Allowed once wait() has
  /// returned kDone or kFailed, or abort() of the transport has returned. Not after kAborted alone:
  /// a transport that is being aborted may still use the buffer.
  virtual ~Message() = default;

  /// Blocks until the message has ended, however long that takes: deadlines, signals and the news
  /// of other ranks are for others to watch, who call MessageTransport::abort(). One thread may
  /// wait, once.
  virtual MessageEnd wait() = 0;
  /// The rank that a receive came from; after wait() gave kDone.
  virtual int source() const = 0;
  /// What the transport says of kFailed.
  virtual const std::string& failure() const = 0;
};

/// What a transport cannot do, said before anything was exchanged.
class Unsupported : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Messages between the ranks of a group: what collectives and user messages between hosts are made
/// of. Sees no torch; bindings/c10d_messages.h makes one of any backend of torch.distributed.
///
/// Messages of one sender, receiver and tag match in the order of their calls, and must be of equal
/// size on both sides. Others may overtake each other. A send may wait for its receive to be posted
/// (as Gloo's does): no rank may wait for a send that a peer will only receive after something else
/// of this rank. All functions may be called from any thread.
class MessageTransport {
 public:
  using MessagePtr = std::unique_ptr<Message>;

  /// Tags are 0 to kMaxTag. Users' messages have those under kFirstReservedTag.
  static constexpr int kMaxTag = 0x7fffffff;
  static constexpr int kFirstReservedTag = 0x7f000000;
  static constexpr int kAnySource = -1;

  virtual ~MessageTransport() = default;

  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  /// What `peer` is in the whole group, where this is a part of one.
  virtual int whole_rank(int peer) const { return peer; }
  /// "gloo": for logs.
  virtual const std::string& name() const = 0;

  /// Start a message; neither blocks nor throws, errors are wait()'s. The buffer is the transport's
  /// until the message has ended. No bytes at all are a message as well.
  virtual MessagePtr isend(int peer, int tag, const std::byte* data, std::size_t num_bytes) = 0;
  /// `peer` may be kAnySource; that alone throws, Unsupported, where the transport cannot do it.
  virtual MessagePtr irecv(int peer, int tag, std::byte* data, std::size_t num_bytes) = 0;

  /// For ever: all messages that have not ended, now and later, end with kAborted. Every caller
  /// returns only when the first call is through, so that each may destroy its messages, and then
  /// free their buffers.
  void abort() {
    std::call_once(aborted_, [this] { end_messages(); });
  }

 private:
  /// What abort() does; called once. When it returns, the messages may be destroyed.
  virtual void end_messages() noexcept = 0;

  std::once_flag aborted_;
};

}  // namespace ringcomm

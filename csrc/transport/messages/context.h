#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "collectives/call_header.h"
#include "host/call_step.h"
#include "transport/messages/members.h"
#include "transport/messenger.h"
#include "transport/transport.h"

namespace ringcomm {

/// The tags of ringcomm's own messages, above the users'. A messenger orders messages by pair and
/// tag.
struct MessageTags {
  static constexpr int kEnvelope = Messenger::kFirstReservedTag;
  static constexpr int kData = kEnvelope + 1;
  static constexpr int kReduceScatter = kEnvelope + 2;
  static constexpr int kAllGather = kEnvelope + 3;

  /// Data of so many bytes at most has a tag of its size, so its receive may be posted before the
  /// envelope is checked: a message of another size does not match it.
  static constexpr std::size_t kMaxSized = std::size_t{1} << 20;
  static constexpr int kFirstSized = kEnvelope + 0x200000;
  static constexpr int of_data(std::size_t num_bytes) {
    return num_bytes <= kMaxSized ? kFirstSized + static_cast<int>(num_bytes) : kData;
  }

  /// Sends and receives of ringcomm's own, whose tags are above the users' 32 bits.
  static constexpr int kFirstInternal = kEnvelope + 0x100000;
  static constexpr std::uint64_t kNumInternal = 0x100000;
  /// The tags of users' long messages of a pair, used in turn; messages with one tag are in order.
  static constexpr std::uint32_t kNumLong = 1U << 20;
  static constexpr int kFirstLong = Messenger::kMaxTag - static_cast<int>(kNumLong);

  static constexpr bool is_internal(std::uint64_t tag) { return tag >> 32U != 0; }
  /// The messenger's tag for a tag of a send or receive. Internal ones are numbered; two of a pair
  /// that are a million apart share a tag and are in order.
  static constexpr int of(std::uint64_t tag) {
    return is_internal(tag) ? kFirstInternal + static_cast<int>(tag % kNumInternal)
                            : static_cast<int>(tag);
  }
};

/// What one rank sends another first: a header and the size of the data, and the data itself up to
/// the eager limit, `kEagerBytes`. Its receive has room for any envelope, so it always fits.
template <class Header, std::size_t kEagerBytes>
struct Envelope {
  Header header;
  std::uint64_t num_bytes;
  std::array<std::byte, kEagerBytes> data;

  bool is_whole() const { return num_bytes <= kEagerBytes; }
  /// What is sent; the rest is not touched.
  std::size_t message_bytes() const {
    return sizeof(Envelope) - kEagerBytes + (is_whole() ? num_bytes : 0);
  }
};
/// Copying 64 KiB takes about 10 us on each side, and a message of its own about 100 us.
using MessageEnvelope = Envelope<CallHeader, std::size_t{64} << 10>;

/// A message that has been started and not been waited for.
struct PostedMessage {
  std::unique_ptr<MessageEnvelope> envelope;  // of an envelope; outlives the message
  Messenger::MessagePtr message;
  int peer;
};

/// The messages and staging memory of one collective. They belong to the context and not to the
/// functions that use them: an exception must not free what the messenger still reads or writes. So
/// after one the messenger is aborted before the context's end.
class MessageContext {
 public:
  using Handle = std::list<PostedMessage>::iterator;

  /// All must live as long. `ahead` has, by peer, the receive of its next envelope where one is
  /// posted ahead: a credit, with which that envelope crosses the network without asking first.
  MessageContext(Messenger& messenger, std::vector<PostedMessage>& ahead, MessageMembers& members,
                 MessageMembers::Clock::time_point deadline)
      : messenger_(messenger), ahead_(ahead), members_(members), operation_(members, deadline) {
    step() = {};
  }

  int rank() const { return messenger_.rank(); }
  int world_size() const { return messenger_.world_size(); }

  CallStep& step() { return members_.step(); }

  Handle irecv(int peer, int tag, void* data, std::size_t num_bytes);
  Handle isend(int peer, int tag, const void* data, std::size_t num_bytes);
  Handle isend(int peer, std::unique_ptr<MessageEnvelope> envelope);
  Handle irecv_envelope(int peer);
  /// Posts the receive of the peer's next envelope in the memory of one that has been read.
  void post_ahead(int peer, std::unique_ptr<MessageEnvelope> envelope);
  /// Returns when the message is done, and forgets it, but for an envelope. Throws Stopped naming
  /// the peer.
  std::unique_ptr<MessageEnvelope> wait(Handle message, bool is_arrival = false);
  /// Throws Stopped where another rank reports within two seconds why the group has ended.
  void raise_if_reported(int peer);
  /// All peers whose calls this rank sees directly have begun theirs.
  void end_arrivals() { is_arriving_ = false; }

  /// Counts bytes of the call's data.
  void count(int peer, std::uint64_t sent, std::uint64_t received) {
    if (sent + received > 0)
      members_.record({.rank = peer, .sent_bytes = sent, .received_bytes = received});
  }

  /// Memory as long as the context's, aligned for any element.
  std::byte* stage(std::size_t num_bytes);

  /// Waits for all messages left. Throws as wait() does.
  void finish() {
    while (!posted_.empty()) wait(posted_.begin());
  }

 private:
  PostedMessage receive_of(int peer, std::unique_ptr<MessageEnvelope> envelope);
  Handle keep(PostedMessage posted) { return posted_.insert(posted_.end(), std::move(posted)); }

  Messenger& messenger_;
  std::vector<PostedMessage>& ahead_;
  MessageMembers& members_;
  MessageMembers::Operation operation_;
  bool is_arriving_ = true;
  std::vector<std::unique_ptr<std::byte[]>> staging_;  // outlives the messages of this context
  std::list<PostedMessage> posted_;
};

/// Direct transfers from one rank to another, any number at the same time. May be used again after
/// finish().
///
/// In every collective a rank first receives an envelope from the previous rank. So different calls
/// are detected even if their communication patterns have nothing in common.
class MessageExchange {
 public:
  MessageExchange(MessageContext& context, const CallHeader& header)
      : context_(context), header_(header) {}

  /// Starts a transfer. `data` is read until finish(), which starts what is too long for a tag of
  /// its size: sooner, it would be on the connection in front of what this rank says it expects.
  void send(int peer, const void* data, std::size_t num_bytes);
  /// Fills `data` until finish() returns, which waits for the peers in the order of these calls.
  /// Where both are to be posted, receives come first: Gloo then sends without a round trip.
  void recv(int peer, void* data, std::size_t num_bytes);
  /// Returns when all transfers have ended. Throws Stopped, and Mismatched if a peer made a
  /// different call or sends a different size.
  void finish();

 private:
  struct Incoming {
    int peer;
    void* data;
    std::size_t num_bytes;
    MessageContext::Handle envelope;
    std::optional<MessageContext::Handle> data_message;
  };

  // Long data, which starts once long data of the same peer is expected.
  struct LateSend {
    int peer;
    std::function<void()> start;
  };

  void open(Incoming& incoming);

  MessageContext& context_;
  const CallHeader& header_;
  std::vector<Incoming> incoming_;
  std::vector<LateSend> late_sends_;
  std::vector<MessageContext::Handle> sends_;
};

/// Whether two ranks' headers may be of one call. Where ranks may have shards of different sizes,
/// those are compared elsewhere.
bool is_compatible(const CallHeader& a, const CallHeader& b);

}  // namespace ringcomm

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/carrier.h"
#include "collectives/collective.h"
#include "collectives/messages/members.h"
#include "transport/messages/message_transport.h"

namespace ringcomm {

/// The tags of ringcomm's own messages, above the users'. A transport orders messages by pair and
/// tag.
struct MessageTags {
  static constexpr int kEnvelope = MessageTransport::kFirstReservedTag;
  static constexpr int kData = kEnvelope + 1;
  static constexpr int kReduceScatter = kEnvelope + 2;
  static constexpr int kAllGather = kEnvelope + 3;
  static constexpr int kChain = kEnvelope + 4;

  /// Data of so many bytes at most has a tag of its size, so its receive may be posted before the
  /// envelope is checked: a message of another size does not match it.
  static constexpr std::size_t kMaxSized = std::size_t{1} << 20;
  static constexpr int kFirstSized = kEnvelope + 0x200000;
  static constexpr int of_data(std::size_t num_bytes) {
    return num_bytes <= kMaxSized ? kFirstSized + static_cast<int>(num_bytes) : kData;
  }

  /// Never sent: a receive of it ends with the connection.
  static constexpr int kGuard = kEnvelope + 0xffff;
  /// Sends and receives of the engine's own, whose tags are above the users' 32 bits.
  static constexpr int kFirstInternal = kEnvelope + 0x100000;
  static constexpr std::uint64_t kNumInternal = 0x100000;
  /// The tags of users' long messages of a pair, used in turn; messages with one tag are in order.
  static constexpr std::uint32_t kNumLong = 1U << 20;
  static constexpr int kFirstLong = MessageTransport::kMaxTag - static_cast<int>(kNumLong);

  static constexpr bool is_internal(std::uint64_t tag) { return tag >> 32U != 0; }
  /// The transport's tag for a tag of a send or receive. Kinds of internal messages differ in bits
  /// 32 and 33. The messages of a kind are numbered; two that are about 500,000 apart share a tag
  /// and are in order.
  static constexpr int of(std::uint64_t tag) {
    if (!is_internal(tag)) return static_cast<int>(tag);
    return kFirstInternal +
           static_cast<int>(((tag >> 33U) * (kNumInternal / 2) + tag % (kNumInternal / 2)) %
                            kNumInternal);
  }
};

/// The state in which collectives of one group run over messages, one after another, on one thread
/// at a time.
///
/// Messages and staging memory belong to the engine and not to the functions that use them: an
/// exception must not free what the transport still reads or writes.
class MessageEngine {
 public:
  /// The slices of collectives. Equal on all ranks.
  struct Cut {
    std::uint32_t num_slots = 2;  ///< receives of a ring that are posted ahead
    /// Of one message of a ring. A message costs much more than a slot in shared memory.
    std::size_t slot_bytes = 1 << 20;
    bool is_rank_ordered = false;  ///< reductions go from left to right over the ranks
  };

  struct Posted {
    MessageTransport::MessagePtr message;
    int peer;  // in the whole group
  };
  /// A message that has been started and not been waited for.
  using Handle = std::list<Posted>::iterator;

  /// `transport` must live as long.
  MessageEngine(MessageTransport& transport, const Cut& cut);

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(ranks_.size()); }
  /// The rank in the whole group, of which a part may be at work (among()).
  int whole_rank(int peer) const { return ranks_[static_cast<std::size_t>(peer)]; }
  const Cut& cut() const { return cut_; }

  /// Runs `body`, in which the group consists of `ranks`, this one among them, in their order.
  /// Stopped and Mismatched have the numbers of the whole group nevertheless.
  template <class Body>
  auto among(const std::vector<int>& ranks, const Body& body) {
    struct Restore {
      MessageEngine& engine;
      std::vector<int> ranks;
      ~Restore() { engine.renumber(std::move(ranks)); }
    } const restore{*this, std::exchange(ranks_, {})};
    renumber(ranks);
    return body();
  }

  /// Starts an operation; `operation` must live until finish() or drop().
  void begin(MessageMembers::Operation& operation) { operation_ = &operation; }

  Handle irecv(int peer, int tag, void* data, std::size_t num_bytes);
  Handle isend(int peer, int tag, const void* data, std::size_t num_bytes);
  /// Returns when the message is done, and forgets it. Throws Stopped naming the peer.
  void wait(Handle message);

  /// A send that is waited for in finish(), or after many more of its kind.
  void post_send(int peer, int tag, const void* data, std::size_t num_bytes);

  /// Memory until unstage(), finish() or drop(), aligned for any element.
  std::byte* stage(std::size_t num_bytes);
  std::size_t num_staged() const { return staging_.size(); }
  /// Frees what was staged after the first `num_staged`: no message uses it any more.
  void unstage(std::size_t num_staged) { staging_.resize(num_staged); }

  /// Ends the operation: waits for all sends. Throws as wait() does.
  void finish();
  /// Ends an operation that failed; the transport has been aborted.
  void drop();

 private:
  void renumber(std::vector<int> ranks);

  MessageTransport& transport_;
  Cut cut_;
  std::vector<int> ranks_;  // those of the whole group that are at work
  int rank_ = 0;            // this one's place there
  MessageMembers::Operation* operation_ = nullptr;
  std::vector<std::unique_ptr<std::byte[]>> staging_;  // outlives the messages of this engine
  std::list<Posted> posted_;
  std::deque<Handle> sends_;  // of post_send()
};

/// Precedes data that one rank sends to another, with its call and size. A message must fit its
/// receive, and the envelope always does, so it is checked before long data is received. Small data
/// is part of it.
struct MessageEnvelope {
  CallHeader header;
  std::uint64_t num_bytes;
  // A page in total: two ranks of one machine copy it in about 1 us, while a separate message costs
  // about 100 us.
  std::array<std::byte, 4096 - sizeof(CallHeader) - sizeof(std::uint64_t)> data;

  bool is_whole() const { return num_bytes <= sizeof(data); }
};

/// Direct transfers from one rank to another, any number at the same time.
///
/// In every collective a rank first receives an envelope from the previous rank and checks it. So
/// different calls are detected even if their communication patterns have nothing in common. An
/// exchange may be used again after finish().
class MessageExchange {
 public:
  MessageExchange(MessageEngine& engine, const CallHeader& header)
      : engine_(engine), header_(header) {}

  /// Starts a transfer. `data` is read until finish().
  void send(int peer, const void* data, std::size_t num_bytes);
  /// Fills `data` until finish() returns, which waits for the peers in the order of these calls.
  void recv(int peer, void* data, std::size_t num_bytes);
  /// The transfers of a gather, scatter or all_to_all between this rank and `peer`, where there is
  /// one. The first returns the bytes sent. all_to_all may be in place if all sends, which then
  /// copy, come before the receives.
  std::size_t send_part(const Collective& call, int peer);
  void recv_part(const Collective& call, int peer);
  /// Returns when all transfers have ended. Throws Stopped, and Mismatched if a peer made a
  /// different call or sends a different size.
  void finish();

 private:
  struct Incoming {
    int peer;
    void* data;
    std::size_t num_bytes;
    MessageEnvelope* envelope;
    MessageEngine::Handle envelope_message;
    std::optional<MessageEngine::Handle> data_message;
  };

  MessageEnvelope& free_envelope();
  void check(const Incoming& incoming) const;

  MessageEngine& engine_;
  const CallHeader& header_;
  std::vector<Incoming> incoming_;
  std::vector<MessageEngine::Handle> sends_;
  std::vector<MessageEnvelope*> envelopes_;  // of the engine's memory
  std::size_t num_used_ = 0;                 // the first of them are in use until finish()
};

/// Exchanges headers between neighbours of the ring, for collectives whose first data goes to other
/// ranks. Also compares `table`, if given, which must be equal on all ranks. Throws Mismatched for
/// a difference.
void greet_neighbours(MessageEngine& engine, const CallHeader& header,
                      const std::vector<std::uint64_t>& table = {});

/// Whether two ranks' headers may be of one call. Where ranks may have shares of different sizes,
/// those are compared elsewhere.
bool is_compatible(const CallHeader& a, const CallHeader& b);
/// Where sizes differ, in words: what `from` has for `to`, and the share of `owner` in the tables
/// of two ranks.
std::string size_difference(int from, std::uint64_t has_bytes, int to, std::uint64_t expects_bytes);
std::string table_difference(std::size_t owner, int a, std::uint64_t a_bytes, int b,
                             std::uint64_t b_bytes);

}  // namespace ringcomm

#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "collectives/call.h"
#include "host/rank_record.h"
#include "transport/messages/message_group.h"
#include "transport/transport.h"

namespace ringcomm {

/// The tags of ringcomm's own messages, above the users'. A messenger orders messages by pair and
/// tag.
struct MessageTags {
  static constexpr int kEnvelope = Messenger::kFirstReservedTag;
  static constexpr int kData = kEnvelope + 1;

  /// Data of so many bytes at most has a tag of its size, so its receive may be posted before the
  /// envelope is checked: a message of another size does not match it.
  static constexpr std::size_t kMaxSized = std::size_t{1} << 20;
  static constexpr int kFirstSized = kEnvelope + 0x200000;
  static constexpr int of_data(std::size_t num_bytes) {
    return num_bytes <= kMaxSized ? kFirstSized + static_cast<int>(num_bytes) : kData;
  }

  /// Sends and receives of ringcomm's own.
  static constexpr int kFirstInternal = kEnvelope + 0x100000;
  static constexpr std::uint64_t kNumInternal = 0x100000;
  /// The tags of users' long messages of a pair, used in turn; messages with one tag are in order.
  static constexpr std::uint32_t kNumLong = 1U << 20;
  static constexpr int kFirstLong = Messenger::kMaxTag - static_cast<int>(kNumLong);

  /// The messenger's tag for that of a send or receive. Internal ones are numbered; two of a pair
  /// that are a million apart share a tag and are in order.
  static int of(const SendRecvOp& op) {
    return op.is_internal() ? kFirstInternal + static_cast<int>(op.tag % kNumInternal)
                            : static_cast<int>(op.tag);
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

/// What the collectives of a group have in common.
struct MessageMemory {
  /// A receive of an envelope. The memory outlives the message.
  struct PostedReceive {
    std::unique_ptr<MessageEnvelope> envelope;
    Messenger::MessagePtr message;
  };
  /// By peer, the receive of its next envelope where one is posted in advance: a credit, with which
  /// that envelope crosses the network without asking first.
  std::vector<PostedReceive> posted;
  std::vector<std::vector<std::byte>> staging;  ///< by the number of stage() in a call
};

/// The messages of one collective, any number at the same time, in two batches: one is on its way
/// while the other one is completed. After an exception the messenger is aborted before the end of
/// the exchange, because it still uses the messages' memory.
///
/// The first message from one rank to another begins with an envelope. In every collective a rank
/// first receives one from the previous rank, so different calls are detected even if their
/// communication patterns have nothing in common. The sizes of later messages follow from the
/// header: they need an envelope only where it has their data, or where the data waits for it.
class MessageExchange {
 public:
  /// All must live as long, and `memory` longer than the messenger's abort.
  MessageExchange(Messenger& messenger, MessageGroup& group, MessageMemory& memory,
                  const CallHeader& header, MessageGroup::Clock::time_point deadline);

  CallStep& step() { return group_.step(); }
  const CallHeader& header() const { return header_; }
  /// Bytes of the call's data that were sent to other ranks.
  std::uint64_t sent_bytes() const { return sent_bytes_; }
  /// Memory for the rest of the collective, aligned for any element. Kept for later ones.
  std::byte* stage(std::size_t num_bytes);

  /// finish() opens this peer's envelope first: other peers may make a call that sends none.
  void open_first(int peer) { first_ = peer; }
  /// From now on the other functions use batch `number` modulo 2.
  void use_batch(std::size_t number) { batch_ = &batches_[number % 2]; }
  /// Starts a transfer. `data` is read until finish_sends(); finish() starts what is too long for a
  /// tag of its size: sooner, it would be on the connection in front of what this rank expects.
  /// Null for data too long for an envelope sends that alone, in advance.
  void send(int peer, const void* data, std::size_t num_bytes);
  /// Fills `data` until finish() returns, which waits for the peers in the order of these calls.
  /// Where both are to be posted, receives come first: Gloo then sends without a round trip.
  void recv(int peer, void* data, std::size_t num_bytes);
  /// Returns when the batch has received all. Throws WaitFailed, and Mismatched if a peer made a
  /// different call or sends a different size.
  void finish();
  /// Returns when the batch, which is finished, has sent all. Throws WaitFailed.
  void finish_sends();
  /// Returns when both batches have received and sent all. Throws as those do.
  void finish_all();

 private:
  struct Transfer {
    bool is_send;
    int peer;
    std::byte* data;  // only read by a send
    std::size_t num_bytes;
    MessageMemory::PostedReceive envelope = {};
    Messenger::MessagePtr message = {};  // of data that is not in the envelope

    bool is_long() const { return num_bytes > MessageTags::kMaxSized; }
    bool has_message() const {
      return data != nullptr && num_bytes > sizeof(MessageEnvelope::data);
    }
  };
  struct Batch {
    std::vector<Transfer> incoming, outgoing;
  };

  static bool takes_envelope(std::vector<bool>& has_met, int peer, std::size_t num_bytes);
  MessageMemory::PostedReceive receive_of(int peer, std::unique_ptr<MessageEnvelope> envelope);
  void start_data(Transfer& transfer);
  void open(Transfer& incoming);
  void wait(Message* message, int peer, bool is_arrival = false);

  Messenger& messenger_;
  MessageGroup& group_;
  MessageMemory& memory_;
  const CallHeader& header_;
  MessageGroup::Operation operation_;
  bool is_arriving_ = true;  // until all peers that it receives from at first have begun
  std::vector<bool> has_sent_, has_received_;  // by peer
  std::uint64_t sent_bytes_ = 0;
  std::size_t num_staged_ = 0;
  int first_ = -1;
  std::array<Batch, 2> batches_;
  Batch* batch_ = &batches_[0];
};

/// What `values` has for a rank or a host.
template <class Values>
auto& of(Values& values, int number) {
  return values[static_cast<std::size_t>(number)];
}

/// The ranks of a group by host, as one of them sees them.
struct HostsView {
  HostsView(const PeerTable& peer_table, int own_rank);
  /// Every rank as a host of its own.
  static HostsView flat(int world_size, int own_rank);

  int num_hosts() const { return table.num_hosts(); }
  bool is_flat() const { return num_hosts() == table.world_size(); }
  /// For a rank on another host, one of a host's ranks is its rail peer: the one of its own local
  /// rank, modulo the host's size.
  int rail_peer(int other_rank, int on_host) const;
  /// One rank of each host, by host: the root of its own, if there is one, else the leader.
  std::vector<int> representatives(int root) const;

  PeerTable table;
  int rank;
  int host;
  int local_rank;                // the place among this host's ranks
  std::vector<int> local_ranks;  // of this host
  std::vector<int> other_hosts;  // the previous one is the first
  /// The ranks of other hosts that this host's ranks serve as rail peers, by local rank; -1 for
  /// none. In rounds, because another host may have more ranks.
  std::vector<std::vector<int>> rounds;
};

/// One collective of one rank, and what its algorithms need. A rank is a number in the group; a
/// local rank is a number among its host's ranks, and only calls of run_local() use it. Over
/// messages alone every rank is a host.
///
/// Every algorithm waits for a run_local() before it waits for a message: that compares the calls
/// of the host's ranks, so that from then on they are one (docs/design/messages.md).
struct HostsCall {
  const HostsView& hosts;
  Transport* local;  ///< of this host's ranks; null if there is one, or messages only
  MessageExchange& exchange;
  const Collective& call;
  const WaitLimits& limits;
  RunningClock::time_point deadline = deadline_after(limits.timeout);
  Traffic traffic = {.algorithm = call.algorithm};  ///< of the parts inside the host
  int rank = hosts.rank;
  int world_size = hosts.table.world_size();
  std::size_t element_bytes = ringcomm::element_bytes(call.dtype);

  int num_hosts() const { return hosts.num_hosts(); }
  bool is_ring() const { return call.algorithm == Algorithm::kRing; }
  bool is_elsewhere(int peer) const { return hosts.table.host_of(peer) != hosts.host; }
  int leader_at(int distance) const {
    return hosts.table.leader_of((hosts.host + distance) % num_hosts());
  }
  int previous_leader() const { return leader_at(num_hosts() - 1); }
  std::size_t bytes(std::size_t num_elems) const { return num_elems * element_bytes; }

  void send(int peer, const void* data, std::size_t num_elems) const {
    exchange.send(peer, data, bytes(num_elems));
  }
  void recv(int peer, void* data, std::size_t num_elems) const {
    exchange.recv(peer, data, bytes(num_elems));
  }
  /// The leader of each host but the first receives from the one before it, if only a header, and
  /// before anything else: if calls differ, those of two such neighbours do, and the second notices
  /// it, whatever their patterns. The first host's leader waits for nobody here. The arguments say
  /// whether this rank sends data to the next leader at once, and receives such from the one
  /// before; otherwise how much is sent later.
  void compare_hosts(bool sends_to_next, bool receives_from_previous, std::size_t sent_elems = 0,
                     std::size_t received_elems = 0) const;
  /// Runs a part of the call by this host's ranks, if there are several, which `part` numbers from
  /// 0. Throws WaitFailed and Mismatched with the group's numbers.
  void run_local(Collective part);

  /// Calls post(k) for all pieces in order, and complete(k) once piece k + 1 is posted: messages
  /// are on their way while this host's ranks work on another piece. All is sent in the end.
  template <class Post, class Complete>
  void in_pieces(int step, int num_steps, std::size_t num_pieces, const Post& post,
                 const Complete& complete) const {
    for (std::size_t idx = 0; idx <= num_pieces; ++idx) {
      exchange.step() = {step, num_steps, std::max<std::size_t>(1, idx), num_pieces};
      exchange.use_batch(idx);
      if (idx < num_pieces) post(idx);
      exchange.use_batch(idx + 1);
      if (idx > 0) complete(idx - 1);
    }
    exchange.finish_all();
  }
};

/// The maximum of other ranks' data that a rank stages at a time; larger buffers are cut into
/// pieces. The latency of a message is small next to what it takes on a fast network.
inline constexpr std::size_t kStagingBytes = std::size_t{8} << 20;
/// A slice of a ring or chain: the longest with a tag of its size. Two are received at a time, and
/// two that were received before, or their sums, are sent.
inline constexpr std::size_t kSliceBytes = MessageTags::kMaxSized;
inline constexpr std::size_t kNumSlots = 4;

/// Sets the algorithm of a collective over messages alone, from values that are equal on all ranks.
void plan_message_collective(int world_size, const CommunicatorOptions& options, Collective& call);
/// Runs any collective, with kHierarchical host by host (docs/design/messages.md), otherwise over
/// messages alone. Checks the header of every peer before its data, and the previous rank's or
/// host's in every collective, so some rank detects any difference. Throws WaitFailed, Mismatched.
Traffic run_message_collective(HostsCall call, const HostsView& flat);
/// Of all ranks, by chunks, each of which crosses the network once per host.
void run_by_chunks(HostsCall& call);

/// Sends and receives. A send is complete when its receiver has taken it, so its process may end
/// then. All arguments must live as long.
std::unique_ptr<SendRecv> make_message_send_recv(Messenger& messenger, MessageGroup& group,
                                                 Failure& failure, Stats& stats);

}  // namespace ringcomm

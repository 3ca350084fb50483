#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/collective.h"
#include "collectives/messages/engine.h"
#include "collectives/messages/tags.h"

namespace ringcomm {

/// What stands in front of data that one rank sends to another: the call it belongs to, and its
/// size. Messages must fit their receives, and this one always does; nothing is received into a
/// buffer before it has been looked at. Small data travels in it.
struct MessageEnvelope {
  CallHeader header;
  std::uint64_t num_bytes;
  // A page in all: two ranks of one machine spend a microsecond on copying that, where a message of
  // its own costs a hundred.
  std::array<std::byte, 4096 - sizeof(CallHeader) - sizeof(std::uint64_t)> data;

  bool is_whole() const { return num_bytes <= sizeof(data); }
};

/// Data that goes straight from one rank to another: any number of transfers at once.
///
/// Every collective begins with one in which each rank hears of the rank before it, whatever else:
/// so ranks that made different calls are found, however little their patterns have to do with each
/// other. That envelope is looked at first. An exchange may be used again after finish().
class MessageExchange {
 public:
  MessageExchange(MessageEngine& engine, const CallHeader& header)
      : engine_(engine), header_(header) {}

  /// Starts a transfer. `data` is read until finish().
  void send(int peer, const void* data, std::size_t num_bytes);
  /// Fills `data` in finish().
  void recv(int peer, void* data, std::size_t num_bytes);
  /// The transfers of an all_to_all between this rank and `peer`, both ways; they may be in place.
  /// Returns the bytes sent.
  std::size_t swap_shares(const Collective& call, int peer);
  /// Returns when all have ended. Throws Stopped, and Mismatched where a peer made another call or
  /// sends another size.
  void finish();

 private:
  struct Incoming {
    int peer;
    void* data;
    std::size_t num_bytes;
    MessageEnvelope* envelope;
    MessageEngine::Handle message;
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

/// An exchange without data between neighbours of the ring, for collectives whose first data goes
/// elsewhere. With `table`, which must be equal on all ranks, that as well: throws Mismatched where
/// an entry differs.
void greet_neighbours(MessageEngine& engine, const CallHeader& header,
                      const std::vector<std::uint64_t>& table = {});

}  // namespace ringcomm

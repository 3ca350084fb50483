#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/collective.h"
#include "collectives/messages/engine.h"
#include "collectives/messages/tags.h"

namespace ringcomm {

/// Precedes data that one rank sends to another, with its call and size. A message must fit its
/// receive, and the envelope always does, so it is checked before data is received into a buffer.
/// Small data is part of it.
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
/// Every collective starts with an exchange in which each rank receives an envelope from the
/// previous rank and checks it first. So different calls are detected even if their communication
/// patterns have nothing in common. An exchange may be used again after finish().
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
  /// Returns when all transfers have ended. Throws Stopped, and Mismatched if a peer made a
  /// different call or sends a different size.
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

/// Exchanges headers between neighbours of the ring, for collectives whose first data goes to other
/// ranks. Also compares `table`, if given, which must be equal on all ranks. Throws Mismatched for
/// a difference.
void greet_neighbours(MessageEngine& engine, const CallHeader& header,
                      const std::vector<std::uint64_t>& table = {});

}  // namespace ringcomm

#pragma once

#include "cuda/kernels/reducers.h"
#include "cuda/kernels/rendezvous.h"

// Small calls, by packets: every rank puts its call's header and its data straight into its peers'
// memory, and takes what arrives. In one round a rank sends its data to all that need it; in two,
// an all_reduce sends each owner its part, and owners send the sums. There is no barrier of ranks.

namespace ringcomm::cuda {

/// The digest of a header, which every rank compares, and the header, which is read if it differs.
inline constexpr int kHeaderPackets = 1 + kHeaderWords / 2;

/// How data goes by packets.
enum class PacketShape : std::uint8_t {
  kOneRound,   ///< an all_reduce: all of the data to every peer
  kTwoRounds,  ///< an all_reduce: each owner's part to it, then its sums to every peer
  kOwner,      ///< each owner's shard to it: reduce_scatter, reduce
  kMove        ///< shards that are not reduced
};

/// A block's part: words from block_idx * words_per_block on of each shard.
template <PacketShape kShape, class Reducer, Block B>
class Packets {
 public:
  RINGCOMM_HD Packets(B& block, const KernelCall& call)
      : block_(block),
        call_(call),
        reducer_(call.dtype, call.reduction),
        number_(call.staging.template at<std::uint64_t>(
            call.rank, call.staging.layout.packet_calls_offset(block.block_idx()))),
        calls_before_(number_),  // no other block's, and of this rank alone
        flag_(packet_flag(calls_before_ + 1)),
        turn_(static_cast<std::uint32_t>(packet_turn(calls_before_ + 1))),
        begin_(block.block_idx() * call.words_per_block) {}

  RINGCOMM_HD WaitStatus run() {
    put_all();
    WaitStatus stop = compare_digests();
    if constexpr (kShape == PacketShape::kMove)
      stop = take_all(0, stop);
    else if (call_.world_size <= 2)
      stop = reduce_all<2, 4>(stop);
    else
      stop = reduce_all<8, 1>(stop);
    if constexpr (kShape == PacketShape::kTwoRounds)
      if (stop == WaitStatus::kNone) stop = take_all(round_packets(), stop);
    stop = block_.agree(stop);
    if (block_.thread_idx() == 0) number_ = packets_after(calls_before_, stop == WaitStatus::kNone);
    return stop;
  }

 private:
  static constexpr bool kIsOneBuffer =
      kShape == PacketShape::kOneRound || kShape == PacketShape::kTwoRounds;

  /// Words of an array that this block has.
  struct Words {
    std::uint64_t num_bytes;  ///< of the array
    std::uint32_t first, num;
  };
  /// What `owner` reduces, or gets, of a rank's data of so many bytes.
  RINGCOMM_HD Words words_for(int owner, std::uint64_t num_bytes) const {
    auto end = static_cast<std::uint32_t>((num_bytes + kWordBytes - 1) / kWordBytes);
    std::uint32_t begin = begin_;
    if constexpr (kShape == PacketShape::kTwoRounds) {
      const auto num_ranks = static_cast<std::uint32_t>(call_.world_size);
      const std::uint32_t part_words = (end + num_ranks - 1) / num_ranks;
      const std::uint32_t part_begin = static_cast<std::uint32_t>(owner) * part_words;
      if (part_begin + part_words < end) end = part_begin + part_words;
      begin += part_begin;
    }
    const std::uint32_t left = begin < end ? end - begin : 0;
    return {num_bytes, begin, left < call_.words_per_block ? left : call_.words_per_block};
  }
  RINGCOMM_HD const std::byte* input(int to) const { return call_.inputs[kIsOneBuffer ? 0 : to]; }
  /// What of this rank's data `to` reduces, or gets.
  RINGCOMM_HD Words sent(int to) const {
    return words_for(to, call_.input_bytes[kIsOneBuffer ? 0 : to]);
  }

  /// The packets of this block from `from` to `to`.
  RINGCOMM_HD Packet* places(int to, int from) const {
    const Staging& staging = call_.staging;
    return &staging.template at<Packet>(
        to,
        staging.layout.packets_offset(block_.block_idx(), turn_, static_cast<std::uint32_t>(from)));
  }
  /// Of the data of the second round, after those of the first.
  RINGCOMM_HD std::uint32_t round_packets() const {
    return (call_.staging.layout.packets_per_block - kHeaderPackets) / 2;
  }

  RINGCOMM_HD std::uint64_t header_data(std::uint32_t packet) const {
    if (packet == 0) return call_.header_digest;
    return call_.header[2 * (packet - 1)] | std::uint64_t{call_.header[2 * (packet - 1) + 1]} << 32;
  }
  /// Ranks begin with different peers.
  template <class F>
  RINGCOMM_HD void for_peers(const F& f) const {
    RINGCOMM_ROLLED
    for (int distance = 1; distance < call_.world_size; ++distance)
      f((call_.rank + distance) % call_.world_size);
  }
  RINGCOMM_HD void put_all() {
    RINGCOMM_ROLLED
    for (std::uint32_t i = block_.thread_idx(); i < kHeaderPackets + call_.words_per_block;
         i += block_.num_threads()) {
      std::uint64_t data = i < kHeaderPackets ? header_data(i) : 0;
      const auto load = [&](int to) {  // false where `to` gets no packet
        if (i < kHeaderPackets) return true;
        const Words words = sent(to);
        const std::uint32_t word = i - kHeaderPackets;
        if (word < words.num) data = load_word(input(to), words.first + word, words.num_bytes);
        return word < words.num;
      };
      if (kShape == PacketShape::kOneRound && !load(0)) break;
      for_peers([&](int peer) {
        if (kShape != PacketShape::kOneRound && !load(peer)) return;
        put_packet(block_, places(peer, call_.rank)[i], data, flag_);
      });
    }
  }

  /// A thread that finds a different call reports it to the host at once, which ends the other
  /// threads' waits for data that may never arrive.
  /// The last threads compare digests: in short calls they have no data.
  RINGCOMM_HD WaitStatus compare_digests() {
    RINGCOMM_ROLLED
    for (auto rank = static_cast<int>(block_.num_threads() - 1 - block_.thread_idx());
         rank < call_.world_size; rank += static_cast<int>(block_.num_threads())) {
      std::uint64_t data = call_.header_digest;
      if (rank != call_.rank)
        if (const WaitStatus stop = await_one(rank, 0, data); stop != WaitStatus::kNone)
          return stop;
      if (data == call_.header_digest) continue;
      tell_alone(block_, call_, kMismatch, rank, [&](int word) {
        std::uint64_t words = 0;
        const WaitStatus is_late = await_one(rank, 1 + static_cast<std::uint32_t>(word) / 2, words);
        return is_late == WaitStatus::kNone ? static_cast<std::uint32_t>(words >> (word % 2 * 32))
                                            : 0;
      });
      return WaitStatus::kAborted;
    }
    return WaitStatus::kNone;
  }

  RINGCOMM_HD std::uint32_t word_idx(std::uint32_t first, int u) const {
    return first + static_cast<std::uint32_t>(u) * block_.num_threads() + block_.thread_idx();
  }
  RINGCOMM_HD WaitStatus await_one(int rank, std::uint32_t packet, std::uint64_t& data) {
    std::uint64_t all[1];
    const WaitStatus stop = await_all<1>(
        [&](int, std::uint32_t& place) {
          place = packet;
          return rank;
        },
        all);
    data = all[0];
    return stop;
  }
  /// Loads kNum packets together until all have come. `place_of` returns the rank of one, and its
  /// place; those of this rank are not awaited.
  template <int kNum, class PlaceOf>
  RINGCOMM_HD WaitStatus await_all(const PlaceOf& place_of, std::uint64_t (&data)[kNum]) {
    constexpr int kLooks = 1000;  // between two questions of whether to go on: they go to the host
    RINGCOMM_ROLLED
    for (int look = 1;; ++look) {
      std::uint64_t high[kNum];
      int missing = -1;
      RINGCOMM_UNROLL
      for (int i = 0; i < kNum; ++i) {
        std::uint32_t packet = 0;
        const int rank = place_of(i, packet);
        block_.load_packet(places(call_.rank, rank)[packet], data[i], high[i]);
      }
      RINGCOMM_UNROLL
      for (int i = 0; i < kNum; ++i) {
        std::uint32_t packet = 0;
        const int rank = place_of(i, packet);
        if (!open_packet(data[i], high[i], flag_, data[i]) && rank != call_.rank) missing = rank;
      }
      if (missing < 0) return WaitStatus::kNone;
      block_.pause();
      if (look % kLooks != 0) continue;
      if (const WaitStatus stop = block_.stopped(missing); stop != WaitStatus::kNone) return stop;
    }
  }

  /// Reduces this rank's words, several at a time; with two rounds sends the sums. Nothing is
  /// stored before all digests have been compared.
  template <int kRanks, int kWords>
  RINGCOMM_HD WaitStatus reduce_all(WaitStatus stop) {
    const Words words = sent(call_.rank);
    std::uint32_t first = 0;
    do {
      typename Reducer::Word acc[kWords] = {};
      if (stop == WaitStatus::kNone && word_idx(first, 0) < words.num)
        stop = reduce<kRanks, kWords>(words, first, acc);
      if (first == 0) stop = block_.agree(stop);
      if (stop != WaitStatus::kNone) break;
      RINGCOMM_UNROLL
      for (int u = 0; u < kWords; ++u)
        if (const std::uint32_t word = word_idx(first, u); word < words.num)
          keep(words, word, reducer_.result(acc[u], call_.divisor));
      first += kWords * block_.num_threads();
    } while (first < words.num);
    return stop;
  }
  template <int kRanks, int kWords>
  RINGCOMM_HD WaitStatus reduce(const Words& words, std::uint32_t first,
                                typename Reducer::Word (&acc)[kWords]) {
    RINGCOMM_ROLLED
    for (int first_rank = 0; first_rank < call_.world_size; first_rank += kRanks) {
      // Instead of ranks and words that there are not, the last ones again.
      std::uint64_t data[kRanks * kWords];
      const WaitStatus stop = await_all<kRanks * kWords>(
          [&](int i, std::uint32_t& packet) {
            const std::uint32_t word = word_idx(first, i / kRanks);
            packet = kHeaderPackets + (word < words.num ? word : words.num - 1);
            const int rank = first_rank + i % kRanks;
            return rank < call_.world_size ? rank : call_.world_size - 1;
          },
          data);
      if (stop != WaitStatus::kNone) return stop;
      RINGCOMM_UNROLL
      for (int i = 0; i < kRanks * kWords; ++i) {
        const int rank = first_rank + i % kRanks;
        const std::uint32_t word = word_idx(first, i / kRanks);
        if (rank >= call_.world_size || word >= words.num) continue;
        if (rank == call_.rank)
          data[i] = load_word(input(rank), words.first + word, words.num_bytes);
        if (rank == 0)
          acc[i / kRanks] = reducer_.first(data[i]);
        else
          reducer_.add(acc[i / kRanks], data[i]);
      }
    }
    return WaitStatus::kNone;
  }
  RINGCOMM_HD void keep(const Words& words, std::uint32_t word, std::uint64_t result) {
    store_word(call_.outputs[0], words.first + word, words.num_bytes, result);
    if constexpr (kShape == PacketShape::kTwoRounds)
      for_peers([&](int peer) {
        put_packet(block_, places(peer, call_.rank)[kHeaderPackets + round_packets() + word],
                   result, flag_);
      });
  }

  /// Takes each rank's words, several at a time, from packet `from` on of its data. In a move
  /// nothing is stored before all digests have been compared.
  RINGCOMM_HD WaitStatus take_all(std::uint32_t from, WaitStatus stop) {
    constexpr int kWords = 4;
    const std::uint32_t num = static_cast<std::uint32_t>(call_.world_size) * call_.words_per_block;
    std::uint32_t first = 0;
    do {
      std::uint64_t data[kWords];
      const auto item_of = [&](int u, std::uint32_t& word) {
        const std::uint32_t idx = word_idx(first, u);
        const auto rank = static_cast<int>(idx / call_.words_per_block);
        word = idx - static_cast<std::uint32_t>(rank) * call_.words_per_block;
        return idx < num && word < taken(rank).num ? rank : call_.rank;
      };
      if (stop == WaitStatus::kNone && word_idx(first, 0) < num)
        stop = await_all<kWords>(
            [&](int u, std::uint32_t& packet) {
              const int rank = item_of(u, packet);
              packet = kHeaderPackets + (rank == call_.rank ? 0 : from + packet);
              return rank;
            },
            data);
      if constexpr (kShape == PacketShape::kMove)
        if (first == 0) stop = block_.agree(stop);
      if (stop != WaitStatus::kNone) break;
      RINGCOMM_UNROLL
      for (int u = 0; u < kWords; ++u) {
        std::uint32_t word = 0;
        const int rank = item_of(u, word);
        if (rank != call_.rank) store_taken(rank, word, data[u]);
      }
      first += kWords * block_.num_threads();
    } while (first < num);
    if constexpr (kShape == PacketShape::kMove)
      if (stop == WaitStatus::kNone) keep_own();
    return stop;
  }
  /// What this rank gets of another one's, and where.
  RINGCOMM_HD Words taken(int rank) const {
    return kShape == PacketShape::kMove ? words_for(rank, call_.output_bytes[rank]) : sent(rank);
  }
  RINGCOMM_HD void store_taken(int rank, std::uint32_t word, std::uint64_t data) const {
    const Words words = taken(rank);
    store_word(call_.outputs[kShape == PacketShape::kMove ? rank : 0], words.first + word,
               words.num_bytes, data);
  }
  RINGCOMM_HD void keep_own() const {
    const Words words = taken(call_.rank);
    if (call_.inputs[call_.rank] == call_.outputs[call_.rank]) return;
    RINGCOMM_ROLLED
    for (std::uint32_t word = block_.thread_idx(); word < words.num; word += block_.num_threads())
      store_taken(call_.rank, word,
                  load_word(call_.inputs[call_.rank], words.first + word, words.num_bytes));
  }

  B& block_;
  const KernelCall& call_;
  Reducer reducer_;
  std::uint64_t& number_;
  std::uint64_t calls_before_;
  std::uint32_t flag_;
  std::uint32_t turn_;
  std::uint32_t begin_;
};

template <PacketShape kShape, class Reducer, Block B>
RINGCOMM_HD void send_packets(B& block, const KernelCall& call) {
  std::uint32_t& busy = call.staging.template at<std::uint32_t>(
      call.rank,
      call.staging.layout.packet_calls_offset(block.block_idx()) + sizeof(std::uint64_t));
  const bool is_free = claim(block, busy);
  Packets<kShape, Reducer, B> packets(block, call);
  if (!is_free) tell_alone(block, call, kOverlap, call.rank, NoWords());
  finish(block, call, packets.run());
  end_claim(block, busy);
}

}  // namespace ringcomm::cuda

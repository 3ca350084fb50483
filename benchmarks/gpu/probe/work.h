#pragma once

#include <cstdint>

// What the probe and its kernels share. tests/emulator has the same kernels for the host.

namespace ringcomm::probe {

/// Mapped host memory. Each word has one writer.
struct Words {
  static constexpr unsigned kMaxBlocks = 512;
  struct Block {
    std::uint64_t began_ns, ended_ns, multiprocessor;
    std::uint64_t number;  ///< of probe_hold: its longest pause in ns; of probe_cluster: blocks
  };
  std::uint64_t has_started;  ///< by the kernel
  std::uint64_t address;      ///< by the host: what probe_follow reads
  std::uint64_t value;        ///< by the kernel: the 4 bytes there
  std::uint64_t has_read;     ///< by the kernel
  std::uint64_t unused[4];
  Block blocks[kMaxBlocks];  ///< by probe_hold and probe_cluster
};
static_assert(sizeof(Words::Block) == 32 && sizeof(Words) == 64 + 32 * Words::kMaxBlocks);

/// The parameter of each kernel.
struct Work {
  Words* words;
  std::uint64_t limit_ns;  ///< how long it runs; how long probe_follow waits for an address
};

}  // namespace ringcomm::probe

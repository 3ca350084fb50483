#pragma once

namespace ringcomm::emulator {

/// Bytes that stand for parts of a GPU, which processes of a box lock: they come free with the
/// process that has them, however that ends.
inline constexpr int kTurnByte = 0;
inline constexpr int kFirstSlotByte = 1;

/// Locks, or with F_UNLCK unlocks, bytes of a GPU; `waits` until that can be. False where another
/// process has them. Threads of a process do not keep each other out.
bool lock_bytes(int physical_device, int begin, int num_bytes, short type, bool waits);

}  // namespace ringcomm::emulator

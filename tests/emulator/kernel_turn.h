#pragma once

namespace ringcomm::emulator {

/// Holds a GPU for the kernels of this process while it lives, where there is no MPS; kernels of
/// one process share it. Others wait, for a lock of the system on the file of this library, which a
/// process that dies gives back.
class KernelTurn {
 public:
  explicit KernelTurn(int physical_device);
  ~KernelTurn();
  KernelTurn(const KernelTurn&) = delete;
  KernelTurn& operator=(const KernelTurn&) = delete;

 private:
  const int device_;
};

}  // namespace ringcomm::emulator

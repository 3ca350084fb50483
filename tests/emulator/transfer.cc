// Copies, fills and functions of the host, which streams do.
#include <cstring>

#include "emulator/address_space.h"
#include "emulator/capture.h"
#include "emulator/stream.h"

namespace ringcomm::emulator {
namespace {

/// Memory that the driver does not know is taken for pageable memory of the host; what begins in
/// memory that it knows must not leave it.
Result check_operand(DevicePtr address, std::size_t num_bytes, bool* is_pageable) {
  Piece piece;
  *is_pageable = !AddressSpace::of_process().find(address, &piece);
  if (*is_pageable) return address != 0 ? kSuccess : kInvalidValue;
  return piece.may_access(address, num_bytes) ? kSuccess : kInvalidValue;
}

}  // namespace

Result api::memset_d8_async(DevicePtr address, unsigned char value, std::size_t num_bytes,
                            StreamHandle handle) {
  std::shared_ptr<StreamTag> stream;
  RINGCOMM_TRY(find_stream(handle, &stream));
  if (num_bytes == 0) return kSuccess;
  bool is_pageable = false;
  RINGCOMM_TRY(check_operand(address, num_bytes, &is_pageable));
  if (is_pageable) return kInvalidValue;
  return submit(*stream, [=] { std::memset(as_pointer(address), value, num_bytes); });
}

Result api::memcpy_async(DevicePtr to, DevicePtr from, std::size_t num_bytes, StreamHandle handle) {
  std::shared_ptr<StreamTag> stream;
  RINGCOMM_TRY(find_stream(handle, &stream));
  if (num_bytes == 0) return kSuccess;
  bool writes_pageable = false;
  bool reads_pageable = false;
  RINGCOMM_TRY(check_operand(to, num_bytes, &writes_pageable));
  RINGCOMM_TRY(check_operand(from, num_bytes, &reads_pageable));
  RINGCOMM_TRY(submit(*stream, [=] { std::memmove(as_pointer(to), as_pointer(from), num_bytes); }));
  // Pageable memory is only used during the call; a graph that has it uses it when it runs.
  if ((writes_pageable || reads_pageable) && !is_capturing(*stream)) stream->synchronize();
  return kSuccess;
}

Result api::launch_host_func(StreamHandle handle, void (*function)(void*), void* data) {
  std::shared_ptr<StreamTag> stream;
  RINGCOMM_TRY(find_stream(handle, &stream));
  if (function == nullptr) return kInvalidValue;
  return submit(*stream, [=] { function(data); });
}

}  // namespace ringcomm::emulator

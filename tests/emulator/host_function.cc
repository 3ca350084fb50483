#include "emulator/capture.h"
#include "emulator/stream.h"

namespace ringcomm::emulator {

Result api::launch_host_func(StreamHandle handle, void (*function)(void*), void* data) {
  std::shared_ptr<StreamTag> stream;
  RINGCOMM_TRY(find_stream(handle, &stream));
  if (function == nullptr) return kInvalidValue;
  return submit(*stream, [=] { function(data); });
}

}  // namespace ringcomm::emulator

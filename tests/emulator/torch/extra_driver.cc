#include "emulator/torch/extra_driver.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <type_traits>

namespace ringcomm::emulator {

const ExtraDriverApi& extra_driver() {
  static const ExtraDriverApi found = [] {
    cuda::driver();  // opens the library for all to see
    ExtraDriverApi api;
    const auto find = [](auto& function, const char* symbol) {
      void* address = dlsym(RTLD_DEFAULT, symbol);
      TORCH_CHECK(address != nullptr, "emugpu wants the emulator of CUDA's driver: no ", symbol);
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
    };
#define RINGCOMM_FIND(member, symbol, parameters) find(api.member, symbol);
    RINGCOMM_EXTRA_DRIVER_FUNCTIONS(RINGCOMM_FIND)
#undef RINGCOMM_FIND
    return api;
  }();
  return found;
}

}  // namespace ringcomm::emulator

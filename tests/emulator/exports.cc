#include "emulator/exports.h"

#include <array>
#include <atomic>
#include <cstring>

#include "emulator/errors.h"

namespace ringcomm::emulator {
namespace {

#define RINGCOMM_SYMBOL(member, symbol, parameters) symbol,
constexpr const char* kSymbols[] = {RINGCOMM_DRIVER_FUNCTIONS(RINGCOMM_SYMBOL)
                                        RINGCOMM_EXTRA_DRIVER_FUNCTIONS(RINGCOMM_SYMBOL)};
#undef RINGCOMM_SYMBOL
std::array<std::atomic<long long>, std::size(kSymbols)> num_calls = {};

#define RINGCOMM_NUMBER(member, symbol, parameters) k_##member,
enum Number : int {
  RINGCOMM_DRIVER_FUNCTIONS(RINGCOMM_NUMBER) RINGCOMM_EXTRA_DRIVER_FUNCTIONS(RINGCOMM_NUMBER)
};
#undef RINGCOMM_NUMBER

template <auto kFunction, int kNumber>
struct Counted;
template <class... Parameters, Result (*kFunction)(Parameters...), int kNumber>
struct Counted<kFunction, kNumber> {
  static Result call(Parameters... parameters) {
    num_calls[kNumber].fetch_add(1, std::memory_order_relaxed);
    return kFunction(parameters...);
  }
};

}  // namespace

// Under CUDA's name dlsym() finds what the resolver returns.
#define RINGCOMM_EXPORT(member, symbol, parameters)            \
  extern "C" decltype(&api::member) ringcomm_find_##member() { \
    return &Counted<&api::member, k_##member>::call;           \
  }                                                            \
  Result exported_##member parameters __asm__(symbol)          \
      __attribute__((visibility("default"), ifunc("ringcomm_find_" #member)));
RINGCOMM_DRIVER_FUNCTIONS(RINGCOMM_EXPORT)
RINGCOMM_EXTRA_DRIVER_FUNCTIONS(RINGCOMM_EXPORT)
#undef RINGCOMM_EXPORT

/// How often this process has called the function of this name, such as "cuLaunchKernel"; -1 if it
/// does not exist.
extern "C" [[gnu::visibility("default")]] long long emulator_num_calls(const char* symbol) {
  for (std::size_t i = 0; i < std::size(kSymbols); ++i)
    if (std::strcmp(kSymbols[i], symbol) == 0) return num_calls[i];
  return -1;
}

/// The names, in the order of `index`; null after the last one.
extern "C" [[gnu::visibility("default")]] const char* emulator_function_name(int index) {
  return index < static_cast<int>(std::size(kSymbols)) ? kSymbols[index] : nullptr;
}

Result api::get_error_name(Result error, const char** name) {
  if (name == nullptr) return kInvalidValue;
  *name = nullptr;
  if (error == kSuccess) *name = "CUDA_SUCCESS";
  if (error == kErrorNotReady) *name = "CUDA_ERROR_NOT_READY";
#define RINGCOMM_NAME(constant, number, text) \
  if (error == constant) *name = #text;
  RINGCOMM_EMULATED_ERRORS(RINGCOMM_NAME)
#undef RINGCOMM_NAME
  return *name != nullptr ? kSuccess : kInvalidValue;
}

/// The error's text is its name.
Result api::get_error_string(Result error, const char** text) {
  return get_error_name(error, text);
}

}  // namespace ringcomm::emulator

#include "emulator/errors.h"

#include "emulator/exports.h"

namespace ringcomm::emulator {
namespace {

struct Words {
  Result error;
  const char* name;
  const char* text;
};

constexpr Words kWords[] = {{kSuccess, "CUDA_SUCCESS", "no error"},
                            {kErrorNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
#define RINGCOMM_WORDS(constant, number, name, text) {constant, #name, text},
                            RINGCOMM_EMULATED_ERRORS(RINGCOMM_WORDS)
#undef RINGCOMM_WORDS
};

Result look_up(Result error, const char* Words::* which, const char** found) {
  if (found == nullptr) return kInvalidValue;
  *found = nullptr;
  for (const Words& words : kWords)
    if (words.error == error) *found = words.*which;
  return *found != nullptr ? kSuccess : kInvalidValue;
}

}  // namespace

Result api::get_error_name(Result error, const char** name) {
  return look_up(error, &Words::name, name);
}

Result api::get_error_string(Result error, const char** text) {
  return look_up(error, &Words::text, text);
}

}  // namespace ringcomm::emulator

#include "emulator/settings.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace ringcomm::emulator {
namespace {

template <class Number>
Number read(const char* name, Number otherwise, long long least, long long most) {
  const char* text = std::getenv(name);
  if (text == nullptr || *text == '\0') return otherwise;
  long long value = 0;
  const char* const end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, value);
  if (error != std::errc() || rest != end || value < least || value > most) {
    std::fprintf(stderr, "libcuda_emulator: %s=%s means nothing\n", name, text);
    std::abort();
  }
  return static_cast<Number>(value);
}

/// As CUDA has it, the list ends at the first number that no GPU has.
std::vector<int> visible_devices(int num_devices) {
  std::vector<int> devices;
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  if (visible == nullptr) {
    for (int device = 0; device < num_devices; ++device) devices.push_back(device);
    return devices;
  }
  std::string_view rest = visible;
  while (!rest.empty()) {
    const std::string_view text = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), text.size() + 1));
    int device = -1;
    std::from_chars(text.data(), text.data() + text.size(), device);
    if (device < 0 || device >= num_devices) break;
    devices.push_back(device);
  }
  return devices;
}

Settings read_all() {
  Settings made;
  made.devices = visible_devices(read("RINGCOMM_EMULATOR_DEVICES", 1, 0, INT_MAX));
  if (const char* box = std::getenv("RINGCOMM_EMULATOR_BOX"); box != nullptr)
    for (const char letter : std::string_view(box))  // FNV-1a
      made.box = (made.box ^ static_cast<unsigned char>(letter)) * 0x01000193u;
  const int& num_sms = made.num_sms;
#define RINGCOMM_READ(Type, member, name, otherwise, least, most) \
  made.member = read<Type>("RINGCOMM_EMULATOR_" name, otherwise, least, most);
  RINGCOMM_SETTINGS(RINGCOMM_READ)
#undef RINGCOMM_READ
  return made;
}

}  // namespace

const Settings& settings() {
  static const Settings& read_once = *new Settings(read_all());
  return read_once;
}

}  // namespace ringcomm::emulator

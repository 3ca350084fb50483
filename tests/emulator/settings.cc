#include "emulator/settings.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

namespace ringcomm::emulator {
namespace {

[[noreturn]] void refuse(const char* name, std::string_view value) {
  std::fprintf(stderr, "libcuda_emulator: %s=%.*s means nothing\n", name,
               static_cast<int>(value.size()), value.data());
  std::abort();
}

long long parse(const char* name, std::string_view text, long long minimum) {
  long long value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < minimum)
    refuse(name, text);
  return value;
}

long long number(const char* name, long long otherwise, long long minimum) {
  const char* text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : parse(name, text, minimum);
}

bool flag(const char* name, bool otherwise = true) {
  const long long value = number(name, otherwise, 0);
  if (value > 1) refuse(name, std::getenv(name));
  return value == 1;
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

Settings read() {
  Settings made;
  made.devices = visible_devices(static_cast<int>(number("RINGCOMM_EMULATOR_DEVICES", 1, 0)));
  if (const char* box = std::getenv("RINGCOMM_EMULATOR_BOX"); box != nullptr)
    for (const char letter : std::string_view(box))  // FNV-1a
      made.box = (made.box ^ static_cast<unsigned char>(letter)) * 0x01000193u;
  made.num_sms = static_cast<int>(number("RINGCOMM_EMULATOR_SMS", made.num_sms, 1));
  made.num_real_sms = static_cast<int>(number("RINGCOMM_EMULATOR_REAL_SMS", made.num_sms, 1));
  made.blocks_per_sm =
      static_cast<int>(number("RINGCOMM_EMULATOR_BLOCKS_PER_SM", made.blocks_per_sm, 1));
  made.threads_per_block =
      static_cast<int>(number("RINGCOMM_EMULATOR_THREADS", made.threads_per_block, 1));
  made.memory_bytes = static_cast<std::size_t>(
      number("RINGCOMM_EMULATOR_MEMORY", static_cast<long long>(made.memory_bytes), 0));
  made.has_peer_access = flag("RINGCOMM_EMULATOR_PEER_ACCESS");
  made.has_vmm = flag("RINGCOMM_EMULATOR_VMM");
  made.has_ipc = flag("RINGCOMM_EMULATOR_IPC");
  made.has_mps = flag("RINGCOMM_EMULATOR_MPS");
  made.num_queues = static_cast<int>(number("RINGCOMM_EMULATOR_QUEUES", 0, 0));
  made.is_lazy = flag("RINGCOMM_EMULATOR_LAZY", false);
  made.dies_at = number("RINGCOMM_EMULATOR_DIE_AT", 0, 0);
  made.max_delay_us = static_cast<int>(number("RINGCOMM_EMULATOR_DELAY_US", 0, 0));
  return made;
}

}  // namespace

const Settings& settings() {
  static const Settings& read_once = *new Settings(read());
  return read_once;
}

}  // namespace ringcomm::emulator

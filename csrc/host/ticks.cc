#include "host/ticks.h"

#include <array>
#include <cstdio>
#include <string_view>

namespace ringcomm {

bool kernel_uses_cycle_counter(const char* clocksource) {
  std::FILE* file = std::fopen(clocksource, "re");
  if (file == nullptr) return false;
  std::array<char, 64> line{};
  const bool is_read = std::fgets(line.data(), line.size(), file) != nullptr;
  std::fclose(file);
  std::string_view name(is_read ? line.data() : "");
  name = name.substr(0, name.find('\n'));
  return name == "tsc" || name == "kvm-clock" || name == "hyperv_clocksource_tsc_page";
}

}  // namespace ringcomm

#include "host/ticks.h"

#include <fstream>
#include <string>

namespace ringcomm {

bool kernel_uses_cycle_counter(const char* clocksource) {
  std::string name;
  std::getline(std::ifstream(clocksource), name);
  return name == "tsc" || name == "kvm-clock" || name == "hyperv_clocksource_tsc_page";
}

}  // namespace ringcomm

#include "collectives/communicator_options.h"

#include <sstream>

namespace ringcomm {

std::string CommunicatorOptions::to_text() const {
  std::ostringstream text;
  text << "algorithm=" << name_of(algorithm)
       << " deterministic=" << (is_rank_ordered ? "rank_order" : "none")
       << " one_shot_max_bytes=" << one_shot_max_bytes
       << " transport=" << (transport.empty() ? "auto" : transport);
  if (!message_backend.empty()) text << " message_backend=" << message_backend;
  return text.str();
}

}  // namespace ringcomm

#include "transport/membership.h"

#include <sstream>

namespace ringcomm {

std::string AbortReason::to_text() const {
  std::ostringstream line;
  line << static_cast<int>(kind) << ' ' << origin << ' ' << culprit << '\n' << text;
  return line.str();
}

AbortReason AbortReason::from_text(const std::string& text) {
  std::istringstream stream(text);
  int kind = 0;
  AbortReason reason;
  stream >> kind >> reason.origin >> reason.culprit;
  reason.kind = static_cast<ErrorKind>(kind);
  const std::size_t line_end = text.find('\n');
  if (line_end != std::string::npos) reason.text = text.substr(line_end + 1);
  return reason;
}

std::string name_of_process(int rank, std::int64_t pid, bool is_pid_hidden,
                            const std::string& host) {
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(pid) +
         (is_pid_hidden ? " of another PID namespace" : "") + " on " + host + ")";
}

std::string why_it_ended(const std::string& last_words) {
  return last_words.empty() ? "; read the end of its output" : ": " + last_words;
}

}  // namespace ringcomm

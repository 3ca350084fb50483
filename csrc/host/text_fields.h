#pragma once

#include <cstdlib>
#include <initializer_list>
#include <string>
#include <utility>

namespace ringcomm {

/// Texts in the store have the length of each field in front of it: a field may hold anything.
inline std::string to_fields(std::initializer_list<std::string> fields) {
  std::string text;
  for (const std::string& field : fields) text += std::to_string(field.size()) + ":" + field;
  return text;
}

/// Reads what to_fields() has made.
class TextFields {
 public:
  explicit TextFields(std::string text) : text_(std::move(text)) {}
  std::string next() {
    const std::size_t num_chars = std::strtoull(text_.c_str(), nullptr, 10);
    text_.erase(0, text_.find(':'));
    const std::string field = text_.empty() ? "" : text_.substr(1, num_chars);
    text_.erase(0, 1 + field.size());
    return field;
  }
  template <class Number = int>
  Number number() {
    return static_cast<Number>(std::strtoll(next().c_str(), nullptr, 10));
  }

 private:
  std::string text_;
};

}  // namespace ringcomm

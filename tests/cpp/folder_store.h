#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "core/annotations.h"
#include "host/process.h"
#include "host/timed_store.h"

namespace ringcomm::testing {

// Whether RINGCOMM_DEATHS asks for so many of the deaths: "all", or "many".
inline bool asks_for(const char* deaths) {
  const char* found = std::getenv("RINGCOMM_DEATHS");
  return found != nullptr && std::string(found) == deaths;
}

// One file for each key, created atomically.
class FolderStore final : public KeyValueStore {
 public:
  FolderStore(std::string folder, std::function<void()> has_set, std::string prefix = {})
      : folder_(std::move(folder)), has_set_(std::move(has_set)), prefix_(std::move(prefix)) {}

  void set(const std::string& key, const std::string& value) override {
    const std::string fresh = write(key, value);
    RINGCOMM_STEP("before the store has a record");
    std::filesystem::rename(fresh, path_of(key));
    has_set_();
    RINGCOMM_STEP("after the store has a record");
  }
  void set_first(const std::string& key, const std::string& value) override {
    const std::string fresh = write(key, value);
    RINGCOMM_STEP("before the store has the first record");
    [[maybe_unused]] const int ignored = ::link(fresh.c_str(), path_of(key).c_str());
    RINGCOMM_STEP("after the store has the first record");
    std::filesystem::remove(fresh);
  }
  std::optional<std::string> try_get(const std::string& key) override {
    std::ifstream file(path_of(key));
    if (!file) return {};
    std::ostringstream text;
    text << file.rdbuf();
    RINGCOMM_STEP("after a record was read");
    return text.str();
  }
  std::unique_ptr<KeyValueStore> clone() override { return std::make_unique<FolderStore>(*this); }

 private:
  std::string write(const std::string& key, const std::string& value) const {
    // Processes of two PID namespaces may have equal pids.
    const std::string path = path_of(key) + "." + host::random_text();
    std::ofstream(path) << value;
    return path;
  }
  std::string path_of(const std::string& key) const {
    std::string name = prefix_ + key;
    std::replace(name.begin(), name.end(), '/', '_');
    return folder_ + "/" + name;
  }

  std::string folder_;
  std::function<void()> has_set_;
  std::string prefix_;
};

}  // namespace ringcomm::testing

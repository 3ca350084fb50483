#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "transport/key_value_store.h"

namespace ringcomm {

/// A store whose keys stand under a prefix in another one: for a part of a group.
class PrefixedStore final : public KeyValueStore {
 public:
  /// `whole` must live as long.
  PrefixedStore(KeyValueStore& whole, std::string prefix)
      : whole_(&whole), prefix_(std::move(prefix)) {}

  void set(const std::string& key, const std::string& value) override {
    whole_->set(prefix_ + key, value);
  }
  bool get(const std::string& key, std::chrono::milliseconds timeout, std::string& value) override {
    return whole_->get(prefix_ + key, timeout, value);
  }
  bool try_get(const std::string& key, std::string& value) override {
    return whole_->try_get(prefix_ + key, value);
  }
  std::int64_t add(const std::string& key, std::int64_t number) override {
    return whole_->add(prefix_ + key, number);
  }
  void set_first(const std::string& key, const std::string& value) override {
    whole_->set_first(prefix_ + key, value);
  }
  bool is_interrupted() override { return whole_->is_interrupted(); }
  std::unique_ptr<KeyValueStore> clone() override {
    auto copy = std::make_unique<PrefixedStore>(*whole_, prefix_);
    copy->own_ = whole_->clone();
    copy->whole_ = copy->own_.get();
    return copy;
  }

 private:
  std::unique_ptr<KeyValueStore> own_;  // of a clone
  KeyValueStore* whole_;
  std::string prefix_;
};

}  // namespace ringcomm

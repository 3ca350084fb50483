#pragma once

#include <exception>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "bindings/python_errors.h"
#include "transport/membership.h"

namespace ringcomm {

/// Adapts torch's store (TCPStore, FileStore, HashStore, prefixed) to the rendezvous.
class StoreAdapter final : public KeyValueStore {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }

  bool is_interrupted() override { return ringcomm::is_interrupted(); }

  bool try_get(const std::string& key, std::string& value) override {
    if (!store_->check({key})) return false;
    value = store_->get_to_str(key);
    return true;
  }

  std::int64_t add(const std::string& key, std::int64_t number) override {
    return store_->add(key, number);
  }

  void set_first(const std::string& key, const std::string& value) override {
    try {
      store_->compareSet(key, "", value);
    } catch (const std::exception&) {  // a store, also of Python's, that has no such operation
      store_->set(key, value);
    }
  }

  std::unique_ptr<KeyValueStore> clone() override {
    return std::make_unique<StoreAdapter>(store_->clone());
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace ringcomm

#pragma once

#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "transport/key_value_store.h"

namespace ringcomm {

/// torch's store (TCPStore, FileStore, HashStore, prefixed) as rendezvous wants it.
class StoreAdapter final : public KeyValueStore {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }

  bool get(const std::string& key, std::chrono::milliseconds timeout, std::string& value) override {
    try {
      store_->wait({key}, timeout);
    } catch (const std::exception&) {
      // The stores throw different types for a time-out. Asking once more tells it from a store
      // that is gone.
      if (!store_->check({key})) return false;
    }
    value = store_->get_to_str(key);
    return true;
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace ringcomm

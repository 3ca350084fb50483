#pragma once

#include <c10/util/Exception.h>

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "bindings/python_errors.h"
#include "core/errors.h"
#include "transport/backoff.h"
#include "transport/key_value_store.h"
#include "transport/wait_limits.h"

namespace ringcomm {

/// torch's store (TCPStore, FileStore, HashStore, prefixed) as rendezvous wants it.
class StoreAdapter final : public KeyValueStore {
 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override { store_->set(key, value); }

  // Polls: torch's stores cannot be interrupted in wait(), FileStore counts time-outs in seconds,
  // and TCPStore logs a warning for each.
  bool get(const std::string& key, std::chrono::milliseconds timeout, std::string& value) override {
    const auto deadline = deadline_after(timeout);
    for (Backoff backoff; !try_get(key, value); backoff.sleep()) {
      if (is_interrupted())
        throw Error({.kind = ErrorKind::kInterrupted, .op = "init"},
                    "ringcomm: interrupted by a signal while waiting for other ranks");
      if (std::chrono::steady_clock::now() >= deadline) return false;
    }
    return true;
  }

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
    } catch (const c10::NotImplementedError&) {
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

#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <future>
#include <map>
#include <thread>
#include <utility>
#include <vector>

namespace lockstep::train {

/// Values that a thread brings one after the other, in the order of their keys, while others work.
/// Whoever takes one waits for it. Once one could not be brought none after it is: taking any of
/// those throws what went wrong.
template <typename Key, typename Value>
class ReadAhead {
 public:
  using Bring = std::function<Value(const Key&)>;

  /// `bring` is called in the thread alone.
  ReadAhead(std::vector<Key> keys, Bring bring) : keys_(std::move(keys)) {
    for (const Key& key : keys_) promised_[key];
    thread_ = std::thread([this, bring = std::move(bring)] { run(bring); });
  }

  /// Waits for the value that is being brought; the others are left out.
  ~ReadAhead() {
    stopped_ = true;
    thread_.join();
  }
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  bool has(const Key& key) const { return promised_.contains(key); }

  /// Of a key that it has, once.
  Value take(const Key& key) { return promised_.at(key).get_future().get(); }

 private:
  void run(const Bring& bring) {
    std::exception_ptr failure;
    for (const Key& key : keys_) {
      if (stopped_) return;
      std::promise<Value>& promised = promised_.at(key);
      if (failure == nullptr) {
        try {
          promised.set_value(bring(key));
          continue;
        } catch (...) {
          failure = std::current_exception();
        }
      }
      promised.set_exception(failure);
    }
  }

  std::vector<Key> keys_;
  std::map<Key, std::promise<Value>> promised_;
  std::atomic<bool> stopped_ = false;
  std::thread thread_;
};

}  // namespace lockstep::train

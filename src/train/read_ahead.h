#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <map>
#include <mutex>
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
  using Bytes = std::function<std::int64_t(const Key&)>;

  /// `bring` is called in the thread alone. What was brought and not taken stays within
  /// `most_bytes`, by `bytes` of each; but one value always comes, and so does all before one that
  /// somebody waits for.
  ReadAhead(std::vector<Key> keys, Bring bring, const Bytes& bytes, std::int64_t most_bytes)
      : keys_(std::move(keys)), most_bytes_(most_bytes) {
    for (std::size_t i = 0; i < keys_.size(); ++i) {
      Promised& promised = promised_[keys_[i]];
      promised.place = i;
      promised.bytes = bytes(keys_[i]);
    }
    thread_ = std::thread([this, bring = std::move(bring)] { run(bring); });
  }

  /// Waits for the value that is being brought; the others are left out.
  ~ReadAhead() {
    {
      const std::lock_guard lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }
  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  bool has(const Key& key) const { return promised_.contains(key); }

  /// Of a key that it has, once.
  Value take(const Key& key) {
    Promised& promised = promised_.at(key);
    std::future<Value> coming = promised.value.get_future();
    {
      const std::lock_guard lock(mutex_);
      awaited_ = std::max(awaited_, promised.place + 1);
    }
    changed_.notify_one();
    coming.wait();
    {
      const std::lock_guard lock(mutex_);
      held_bytes_ -= promised.bytes;
    }
    changed_.notify_one();
    return coming.get();
  }

 private:
  struct Promised {
    std::promise<Value> value{};
    std::size_t place = 0;  // among the keys
    std::int64_t bytes = 0;
  };

  /// Waits for room; false where nobody wants it any more.
  bool makes_room(const Promised& next) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      return stopped_ || next.place < awaited_ || held_bytes_ == 0 ||
             held_bytes_ + next.bytes <= most_bytes_;
    });
    if (stopped_) return false;
    held_bytes_ += next.bytes;
    return true;
  }

  void run(const Bring& bring) {
    std::exception_ptr failure;
    for (const Key& key : keys_) {
      Promised& next = promised_.at(key);
      if (failure == nullptr) {
        if (!makes_room(next)) return;
        try {
          next.value.set_value(bring(key));
          continue;
        } catch (...) {
          failure = std::current_exception();
        }
      }
      next.value.set_exception(failure);
    }
  }

  std::vector<Key> keys_;
  std::int64_t most_bytes_;
  std::map<Key, Promised> promised_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t awaited_ = 0;  // somebody waits for one of so many first keys
  std::int64_t held_bytes_ = 0;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace lockstep::train

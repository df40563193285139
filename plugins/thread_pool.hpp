// A few threads that share the pieces of one loop. A thread that finds no work looks out for more for some tens of
// microseconds, the time between two operations of a step, and then sleeps; on a loaded machine the caller simply does
// more of the pieces itself, and waits at the end only for pieces that somebody is working on.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace commitkv {

// Visible, so that the libraries of one process find the same pool (its static is a unique symbol) instead of making
// threads of their own that would spin against each other.
class __attribute__((visibility("default"))) ThreadPool {
 public:
  static ThreadPool &shared() {
    static ThreadPool *pool = new ThreadPool;  // never destroyed: its threads may outlive static destructors
    return *pool;
  }

  // Runs body(data) on the caller and on up to num_threads - 1 others; body takes pieces until none is left.
  // A second caller meanwhile works alone.
  void run(void (*body)(void *), void *data, int num_threads) {
    if (num_threads < 2 || !turn_.try_lock()) {
      body(data);
      return;
    }
    bool asleep;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (int(threads_.size()) < num_threads - 1) threads_.emplace_back([this] { serve(); });
      body_ = body, data_ = data, wanted_ = num_threads - 1;
      asleep = sleeping_ > 0;
    }
    if (asleep) wake_.notify_all();
    body(data);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      wanted_ = 0;  // whoever has not come by now need not start
    }
    if (!look_out([this] { return running_ == 0; })) {
      std::unique_lock<std::mutex> lock(mutex_);
      done_.wait(lock, [this] { return running_ == 0; });
    }
    turn_.unlock();
  }

 private:
  static constexpr int LOOKS = 1000;  // some 50 us

  template <typename Condition>
  static bool look_out(const Condition &holds) {
    for (int i = 0; i < LOOKS; ++i) {
      if (holds()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#else
      std::this_thread::yield();
#endif
    }
    return false;
  }

  void serve() {
    while (true) {
      look_out([this] { return wanted_ > 0; });
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleeping_;
      wake_.wait(lock, [this] { return wanted_ > 0; });
      --sleeping_, --wanted_, ++running_;
      void (*body)(void *) = body_;
      void *data = data_;
      lock.unlock();
      body(data);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  void (*body_)(void *) = nullptr;
  void *data_ = nullptr;
  std::atomic<int> wanted_{0}, running_{0};  // changed under mutex_
  int sleeping_ = 0;
};

}  // namespace commitkv

// A few sleeping threads that share the pieces of one loop. Nobody spins: on a loaded machine the caller simply does
// more of the pieces itself, and waits at the end only for pieces that somebody is working on.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace commitkv {

class ThreadPool {
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
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (int(threads_.size()) < num_threads - 1) threads_.emplace_back([this] { serve(); });
      body_ = body, data_ = data, wanted_ = num_threads - 1;
    }
    wake_.notify_all();
    body(data);
    {
      std::unique_lock<std::mutex> lock(mutex_);
      wanted_ = 0;  // whoever has not woken up by now need not start
      done_.wait(lock, [this] { return running_ == 0; });
    }
    turn_.unlock();
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return wanted_ > 0; });
      --wanted_, ++running_;
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
  int wanted_ = 0, running_ = 0;
};

}  // namespace commitkv

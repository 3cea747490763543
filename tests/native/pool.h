// Thread pools for parallel_for.h: tasks start immediately (ready), only when the pool is destroyed (busy), or with a delay (late).
#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

class Pool {
 public:
  enum Kind { ready, busy, late };

  explicit Pool(int threads, Kind kind = ready) : threads_(threads), kind_(kind), open_(kind != busy) {
    // Nothing is ever scheduled in a pool of one thread.
    for (int i = 0; i < threads && threads > 1; ++i) workers_.emplace_back([this, i] { work(i); });
  }
  // Runs the waiting tasks; in a busy pool these are all tasks, after the caller of run_tasks has returned.
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      open_ = closing_ = true;
    }
    changed_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int num_threads() const { return threads_; }

  void Schedule(std::function<void()> function) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      waiting_.push_back(std::move(function));
    }
    changed_.notify_one();
  }

 private:
  void work(int index) {
    for (std::unique_lock<std::mutex> lock(mutex_);;) {
      changed_.wait(lock, [this] { return open_ && (closing_ || !waiting_.empty()); });
      if (waiting_.empty()) return;
      const std::function<void()> function = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      if (kind_ == late) std::this_thread::sleep_for(std::chrono::microseconds(200 * (index + 1)));
      function();
      lock.lock();
    }
  }

  const int threads_;
  const Kind kind_;
  bool open_, closing_ = false;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  std::vector<std::thread> workers_;
};

#include "pending.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <list>
#include <map>
#include <thread>

namespace fake_cuda {
namespace {

struct Touch {
  TaskPtr task;
  bool is_write;
};

struct Pending {
  std::condition_variable_any changed;
  std::list<TaskPtr> tasks; // that have not ended, oldest first
  std::map<void*, std::vector<Touch>> touches;
  std::list<TaskPtr> failed; // that nobody has waited for
};

std::atomic<size_t> the_count{0};

// Never destroyed: threads may run while the process exits.
Pending& pending() {
  static Pending& instance = *new Pending;
  return instance;
}

// The child of a fork has no threads of its parent: it forgets the tasks, which it cannot run.
void survive_forks() {
  static bool is_registered = [] {
    pthread_atfork(
        [] { state_mutex().lock(); }, [] { state_mutex().unlock(); },
        [] {
          new (&pending()) Pending;
          the_count = 0;
          state_mutex().unlock();
        });
    return true;
  }();
  (void)is_registered;
}

class WithoutGil {
 public:
  WithoutGil() : state_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

template <typename Condition>
void wait_until(Condition is_over) {
  if (the_count == 0) return;
  WithoutGil without_gil;
  std::unique_lock<std::recursive_mutex> lock(state_mutex());
  pending().changed.wait(lock, is_over);
}

bool conflicts(const Access& access) {
  auto found = pending().touches.find(access.block);
  if (found == pending().touches.end()) return false;
  return std::any_of(found->second.begin(), found->second.end(), [&](auto& touch) {
    return access.is_write || touch.is_write;
  });
}

// Removes a task; returns the kernels that may run now.
std::vector<TaskPtr> end(const TaskPtr& task) {
  Lock lock(state_mutex());
  std::vector<TaskPtr> ready;
  if (task->is_done) return ready;
  task->is_done = true;
  for (auto& access : task->accesses) {
    auto found = pending().touches.find(access.block);
    if (found == pending().touches.end()) continue; // the task touches the block twice
    auto& touches = found->second;
    touches.erase(
        std::remove_if(touches.begin(), touches.end(), [&](auto& touch) { return touch.task == task; }), touches.end());
    if (!touches.empty()) continue;
    pending().touches.erase(found);
    reuse_if_released(access.block);
  }
  for (auto& later : task->later) {
    if (--later->missing == 0 && later->queue == nullptr) ready.push_back(later);
  }
  task->later.clear();
  pending().tasks.remove(task);
  if (!task->error.empty() && !task->is_aborted) pending().failed.push_back(task);
  --the_count;
  pending().changed.notify_all();
  return ready;
}

void fail(const TaskPtr& task, const char* error) {
  Lock lock(state_mutex());
  if (!task->is_done) task->error = error;
}

void wait_for_abort(Queue& queue) {
  std::unique_lock<std::recursive_mutex> lock(state_mutex());
  pending().changed.wait(lock, [&] { return queue.is_aborted || queue.is_closed; });
}

void run(const TaskPtr& task) {
  std::vector<TaskPtr> ready{task};
  while (!ready.empty()) {
    auto next = ready.back();
    ready.pop_back();
    auto body = std::move(next->run); // an abort may end the task meanwhile
    try {
      body();
    } catch (const MismatchError& error) {
      fail(next, error.what());
    } catch (const std::exception& error) {
      if (next->queue != nullptr && !next->queue->notices_loss) wait_for_abort(*next->queue);
      fail(next, error.what());
    }
    for (auto& each : end(next)) ready.push_back(each);
  }
}

void run_queue(const std::shared_ptr<Queue>& queue) {
  for (;;) {
    TaskPtr next;
    {
      std::unique_lock<std::recursive_mutex> lock(state_mutex());
      pending().changed.wait(lock, [&] {
        auto is_ready = !queue->tasks.empty() && queue->tasks.front()->missing == 0;
        return is_ready || (queue->tasks.empty() && queue->is_closed) || queue->is_aborted;
      });
      if (queue->tasks.empty() || queue->is_aborted) {
        queue->has_thread = false;
        return;
      }
      next = queue->tasks.front();
      queue->tasks.pop_front();
      queue->running = next;
    }
    run(next);
    Lock lock(state_mutex());
    queue->running = nullptr;
  }
}

// Takes the lock, which the caller has.
TaskPtr add(Queue* queue, const Work& work, std::vector<Access> accesses, std::function<void()> run) {
  survive_forks();
  auto task = std::make_shared<Task>(Task{work, std::move(accesses), std::move(run), queue});
  std::vector<TaskPtr> earlier;
  for (auto& access : task->accesses) {
    for (auto& touch : pending().touches[access.block]) {
      auto is_new = std::find(earlier.begin(), earlier.end(), touch.task) == earlier.end();
      if (touch.task != task && (access.is_write || touch.is_write) && is_new) earlier.push_back(touch.task);
    }
    pending().touches[access.block].push_back({task, access.is_write});
  }
  task->missing = static_cast<int>(earlier.size());
  for (auto& each : earlier) each->later.push_back(task);
  pending().tasks.push_back(task);
  ++the_count;
  return task;
}

} // namespace

bool is_pending(const std::vector<Access>& accesses) {
  if (the_count == 0) return false;
  Lock lock(state_mutex());
  return std::any_of(accesses.begin(), accesses.end(), conflicts);
}

TaskPtr enqueue(const Work& work, std::vector<Access> accesses, std::function<void()> kernel) {
  TaskPtr task;
  {
    Lock lock(state_mutex());
    task = add(nullptr, work, std::move(accesses), std::move(kernel));
    if (task->missing > 0) return task;
  }
  run(task);
  return task;
}

TaskPtr enqueue(
    std::shared_ptr<Queue> queue, const Work& work, std::vector<Access> accesses, std::function<void()> collective) {
  Lock lock(state_mutex());
  auto task = add(queue.get(), work, std::move(accesses), std::move(collective));
  queue->tasks.push_back(task);
  if (!queue->has_thread) {
    queue->has_thread = true;
    std::thread(run_queue, queue).detach();
  }
  pending().changed.notify_all();
  return task;
}

void abort(Queue& queue, const std::string& error) {
  std::vector<TaskPtr> ended;
  {
    Lock lock(state_mutex());
    queue.is_aborted = true;
    if (queue.running != nullptr) ended.push_back(queue.running);
    ended.insert(ended.end(), queue.tasks.begin(), queue.tasks.end());
    queue.tasks.clear();
    for (auto& each : ended) {
      each->error = error;
      each->is_aborted = true;
    }
  }
  for (auto& each : ended) {
    for (auto& ready : end(each)) run(ready);
  }
  pending().changed.notify_all();
}

void close(Queue& queue) {
  Lock lock(state_mutex());
  queue.is_closed = true;
  pending().changed.notify_all();
}

void wait_for(const std::vector<Access>& accesses) {
  wait_until([&] { return std::none_of(accesses.begin(), accesses.end(), conflicts); });
}

void wait_for(const TaskPtr& task) {
  wait_until([&] { return task->is_done; });
  Lock lock(state_mutex());
  pending().failed.remove(task);
  TORCH_CHECK_WITH(DistBackendError, task->error.empty(), task->error);
}

bool have_ended(const Clock& clock) {
  if (the_count == 0) return true;
  Lock lock(state_mutex());
  auto& tasks = pending().tasks;
  return std::none_of(tasks.begin(), tasks.end(), [&](auto& task) { return has_finished(clock, task->work); });
}

void wait_for(const Clock& clock) {
  wait_until([&] { return have_ended(clock); });
  std::string error;
  {
    Lock lock(state_mutex());
    auto& failed = pending().failed;
    auto found = std::find_if(failed.begin(), failed.end(), [&](auto& task) { return has_finished(clock, task->work); });
    if (found == failed.end()) return;
    error = (*found)->error;
    failed.erase(found);
  }
  TORCH_CHECK_WITH(DistBackendError, false, error);
}

} // namespace fake_cuda

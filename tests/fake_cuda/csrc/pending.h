// Work of streams that runs later: collectives, which wait for other ranks, and the kernels that need their results.
//
//     host            enqueue() ──────────────► goes on with the program
//                                  │
//     thread of a group            ├── runs the collectives of the group, in their order, each after what it reads
//                                  ▼
//     the same thread          runs each kernel whose last missing task has ended
//
// A task waits for earlier tasks that write what it touches, or read what it writes. All other work is computed at once.
#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "order.h"

namespace fake_cuda {

struct Access {
  void* block;
  bool is_write;
};

struct Queue;

struct Task {
  Work work;
  std::vector<Access> accesses;
  std::function<void()> run;
  Queue* queue; // of a group; nullptr: a kernel
  int missing = 0; // earlier tasks that have not ended
  std::vector<std::shared_ptr<Task>> later;
  std::string error;
  bool is_aborted = false, is_done = false;
};
using TaskPtr = std::shared_ptr<Task>;

// The ranks of a collective do not pass alike.
struct MismatchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The collectives of one group, which a thread runs one after the other.
struct Queue {
  bool notices_loss; // whether a rank that has ended is an error; NCCL waits for it until an abort
  std::deque<TaskPtr> tasks;
  TaskPtr running;
  bool has_thread = false, is_closed = false, is_aborted = false;
};

// Whether a task that has not ended touches memory that these accesses conflict with.
bool is_pending(const std::vector<Access>& accesses);
// Adds a task. A kernel that need not wait for any task is run before this returns.
TaskPtr enqueue(const Work& work, std::vector<Access> accesses, std::function<void()> run);
TaskPtr enqueue(std::shared_ptr<Queue> queue, const Work& work, std::vector<Access> accesses, std::function<void()> run);
// Ends the tasks of a group, also the one that its thread is in. Who waits for the device goes on, without values.
void abort(Queue& queue, const std::string& error);
// Lets the thread of a group end when its tasks have ended.
void close(Queue& queue);

// These wait without the GIL, and must be called without the lock.
void wait_for(const std::vector<Access>& accesses);
void wait_for(const TaskPtr& task);
// Waits for all tasks that have finished at this point of time; throws the error of one that has failed. An aborted one
// has not: the device has nothing to wait for, and knows of no error.
void wait_for(const Clock& clock);
bool have_ended(const Clock& clock);

} // namespace fake_cuda

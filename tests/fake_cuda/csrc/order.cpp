#include "order.h"

#include "durations.h"
#include "pending.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace fake_cuda {
namespace {

constexpr size_t kAlignment = 512;

struct Block {
  int device;
  StreamKey stream; // on which it was allocated; only this stream reuses it
  size_t bytes;
  bool is_released = false;        // while pending work still touches it
  bool has_write = false;
  Work write{};                    // the last one
  std::map<StreamKey, Work> reads; // since the last write, the last of each stream
  std::set<StreamKey> recorded;    // by record_stream
};

struct Pinned {
  size_t bytes;
  int copies = 0; // deferred copies that use it
  bool is_released = false;
};

struct Deferred {
  Work work;
  void* block;  // written by the copy; nullptr: the copy writes host memory
  void* pinned; // base of the host memory
  std::function<void()> copy;
};

struct State {
  std::recursive_mutex mutex;
  std::map<StreamKey, Clock> streams;
  std::map<std::pair<int, Engine>, double> engines; // of each device: the simulated time when it is free, in ms
  Clock host; // one for all threads
  std::map<void*, Block> blocks;
  std::map<std::tuple<StreamKey, size_t>, std::vector<void*>> cached;
  std::map<void*, Pinned> pinned;
  std::deque<Deferred> deferred;
  std::map<int, Statistics> statistics;
  std::set<std::string> reported;
  std::set<int> contexts; // devices
  std::map<std::string, int64_t> launches; // by name
};

// Never destroyed: threads may free memory while the process exits.
State& state() {
  static State& instance = *new State;
  return instance;
}

void join(Clock& clock, const Clock& other) {
  for (auto& [stream, time] : other.finished) {
    auto& mine = clock.finished[stream];
    mine = std::max(mine, time);
  }
  clock.ms = std::max(clock.ms, other.ms);
}

template <typename T>
void* base_of(std::map<void*, T>& memory, const void* address) {
  auto found = memory.upper_bound(const_cast<void*>(address));
  if (found == memory.begin()) return nullptr;
  --found;
  auto end = static_cast<char*>(found->first) + std::max<size_t>(found->second.bytes, 1);
  return static_cast<const char*>(address) < end ? found->first : nullptr;
}

size_t rounded(size_t bytes) {
  return std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
}

std::string describe(const Work& work, bool is_write) {
  auto device = work.stream >> 40, stream = work.stream & ((int64_t{1} << 40) - 1);
  return std::string(is_write ? "write" : "read") + " by " + work.name + " on cuda:" + std::to_string(device) +
      (stream == 0 ? ", default stream" : ", stream " + std::to_string(stream));
}

void report(const Work& later, bool later_writes, const Work& earlier, bool earlier_wrote) {
  fake_cuda::report(describe(later, later_writes) + " is not ordered after " + describe(earlier, earlier_wrote));
}

// Runs a deferred copy, and before it those of its stream that were issued earlier.
void run_until(size_t index) {
  auto& all = state().deferred;
  auto stream = all[index].work.stream;
  auto last = all[index].work.time;
  for (size_t i = 0; i < all.size();) {
    if (all[i].work.stream != stream || all[i].work.time > last) {
      ++i;
      continue;
    }
    auto each = std::move(all[i]);
    all.erase(all.begin() + i);
    each.copy();
    auto& pinned = state().pinned[each.pinned];
    if (--pinned.copies == 0 && pinned.is_released) release_pinned(each.pinned);
  }
}

template <typename Condition>
void run_deferred(Condition is_due) {
  auto& all = state().deferred;
  for (size_t i = 0; i < all.size();) {
    if (is_due(all[i])) {
      run_until(i);
      i = 0;
    } else {
      ++i;
    }
  }
}

void run_deferred_writes(const void* block) {
  run_deferred([&](const Deferred& each) { return each.block == block; });
}

} // namespace

void report(const std::string& text) {
  Lock lock(state_mutex());
  if (!state().reported.insert(text).second) return;
  auto path = std::getenv("FAKE_CUDA_REPORT");
  if (auto file = path ? std::fopen(path, "a") : nullptr) {
    std::fprintf(file, "process %d: %s\n", getpid(), text.c_str());
    std::fclose(file);
  }
}

bool has_finished(const Clock& clock, const Work& work) {
  auto found = clock.finished.find(work.stream);
  return found != clock.finished.end() && found->second >= work.time;
}

std::recursive_mutex& state_mutex() {
  return state().mutex;
}

Work launch(StreamKey stream, const char* name, double ms, Engine engine) {
  Lock lock(state_mutex());
  auto& clock = state().streams[stream];
  ++state().launches[name];
  if (ms > 0) state().host.ms += host_ms();
  join(clock, state().host);
  if (engine != Engine::kNone) {
    auto& free_at = state().engines[{static_cast<int>(stream >> 40), engine}];
    clock.ms = free_at = std::max(clock.ms, free_at) + ms;
  } else {
    clock.ms += ms;
  }
  return {stream, ++clock.finished[stream], name};
}

int64_t launch_count(const std::string& name) {
  Lock lock(state_mutex());
  return state().launches[name];
}

void prolong(const Work& work, double ms) {
  Lock lock(state_mutex());
  auto& clock = state().streams[work.stream];
  clock.ms += ms;
  auto& free_at = state().engines[{static_cast<int>(work.stream >> 40), Engine::kCompute}];
  free_at = std::max(free_at, clock.ms);
}

Clock record(StreamKey stream) {
  Lock lock(state_mutex());
  launch(stream, "event", 0);
  return state().streams[stream];
}

void stream_waits(StreamKey stream, const Clock& clock) {
  Lock lock(state_mutex());
  join(state().streams[stream], clock);
}

void host_waits(const Clock& clock) {
  wait_for(clock);
  Lock lock(state_mutex());
  join(state().host, clock);
  run_deferred([](const Deferred& each) { return has_finished(state().host, each.work); });
}

void host_waits_for_device(int device) {
  Clock all;
  {
    Lock lock(state_mutex());
    for (auto& [stream, clock] : state().streams) {
      if (stream >> 40 == device) join(all, clock);
    }
  }
  host_waits(all);
}

bool is_latest(const Clock& clock) {
  Lock lock(state_mutex());
  for (auto& [stream, time] : clock.finished) {
    if (state().streams[stream].finished[stream] > time) return false;
  }
  return true;
}

bool has_ended(const Clock& clock) {
  if (!have_ended(clock)) return false;
  host_waits(clock);
  return true;
}

double elapsed_ms(const Clock& first, const Clock& last) {
  Lock lock(state_mutex());
  for (auto clock : {&first, &last}) {
    for (auto& [stream, time] : clock->finished) {
      if (state().host.finished[stream] < time)
        throw std::runtime_error("CUDA error: both events must be completed before calculating elapsed time");
    }
  }
  return last.ms - first.ms;
}

void* allocate(int device, StreamKey stream, size_t bytes) {
  Lock lock(state_mutex());
  auto block = allocate_workspace(device, stream, bytes);
  std::memset(block, 0xff, rounded(bytes));
  return block;
}

void* allocate_workspace(int device, StreamKey stream, size_t bytes) {
  Lock lock(state_mutex());
  auto size = rounded(bytes);
  auto& free_blocks = state().cached[{stream, size}];
  void* block = nullptr;
  if (!free_blocks.empty()) {
    block = free_blocks.back();
    free_blocks.pop_back();
  } else {
    block = std::aligned_alloc(kAlignment, size);
    if (block == nullptr) throw std::bad_alloc();
    state().blocks[block] = Block{device, stream, size};
  }
  auto& statistics = state().statistics[device];
  statistics.current += size;
  statistics.peak = std::max(statistics.peak, statistics.current);
  statistics.total_allocations += 1;
  return block;
}

void release(void* memory) {
  if (memory == nullptr) return;
  Lock lock(state_mutex());
  run_deferred_writes(memory);
  auto& block = state().blocks[memory];
  // The allocator reuses the block only after the recorded streams have done their work, and what they wait for.
  for (auto stream : block.recorded) {
    auto& clock = state().streams[stream];
    for (auto read = block.reads.begin(); read != block.reads.end();) {
      read = has_finished(clock, read->second) ? block.reads.erase(read) : std::next(read);
    }
    if (block.has_write && has_finished(clock, block.write)) block.has_write = false;
  }
  block.recorded.clear();
  state().statistics[block.device].current -= block.bytes;
  block.is_released = true;
  if (!is_pending({{memory, true}})) reuse_if_released(memory);
}

void reuse_if_released(void* memory) {
  Lock lock(state_mutex());
  auto found = state().blocks.find(memory);
  if (found == state().blocks.end() || !found->second.is_released) return;
  auto& block = found->second;
  block.is_released = false;
  state().cached[{block.stream, block.bytes}].push_back(memory);
}

void release_cached() {
  Lock lock(state_mutex());
  for (auto& [_, blocks] : state().cached) {
    for (auto each : blocks) {
      state().blocks.erase(each);
      std::free(each);
    }
    blocks.clear();
  }
}

// As the caching allocator, which keeps nothing for the stream that the block belongs to.
void record_use(const void* address, StreamKey stream) {
  Lock lock(state_mutex());
  auto base = base_of(state().blocks, address);
  if (base == nullptr) return;
  auto& block = state().blocks[base];
  if (block.stream != stream) block.recorded.insert(stream);
}

void touch(const void* address, const Work& work, bool is_write) {
  Lock lock(state_mutex());
  auto base = base_of(state().blocks, address);
  if (base == nullptr) return;
  run_deferred_writes(base);
  auto& block = state().blocks[base];
  auto& clock = state().streams[work.stream];
  if (block.has_write && !has_finished(clock, block.write)) report(work, is_write, block.write, true);
  if (!is_write) {
    block.reads[work.stream] = work;
    return;
  }
  for (auto& [_, read] : block.reads) {
    if (!has_finished(clock, read)) report(work, true, read, false);
  }
  block.reads.clear();
  block.has_write = true;
  block.write = work;
}

void* block_of(const void* address) {
  Lock lock(state_mutex());
  return base_of(state().blocks, address);
}

int device_of(const void* address) {
  Lock lock(state_mutex());
  auto block = base_of(state().blocks, address);
  return block == nullptr ? -1 : state().blocks[block].device;
}

void make_context(int device) {
  Lock lock(state_mutex());
  auto& contexts = state().contexts;
  if (!contexts.insert(device).second || contexts.size() == 1) return;
  if (std::getenv("FAKE_CUDA_ONE_CONTEXT")) report("a second context, on cuda:" + std::to_string(device));
}

bool has_context(int device) {
  Lock lock(state_mutex());
  return state().contexts.count(device) > 0;
}

Statistics statistics(int device) {
  Lock lock(state_mutex());
  return state().statistics[device];
}

void reset_peak(int device) {
  Lock lock(state_mutex());
  auto& found = state().statistics[device];
  found.peak = found.current;
}

void* allocate_pinned(size_t bytes) {
  Lock lock(state_mutex());
  auto memory = std::aligned_alloc(kAlignment, rounded(bytes));
  if (memory == nullptr) throw std::bad_alloc();
  state().pinned[memory] = Pinned{bytes};
  return memory;
}

void release_pinned(void* memory) {
  if (memory == nullptr) return;
  Lock lock(state_mutex());
  auto& pinned = state().pinned[memory];
  pinned.is_released = true;
  if (pinned.copies > 0) return;
  state().pinned.erase(memory);
  std::free(memory);
}

bool is_pinned(const void* address) {
  Lock lock(state_mutex());
  return base_of(state().pinned, address) != nullptr;
}

size_t pinned_bytes() {
  Lock lock(state_mutex());
  size_t total = 0;
  for (auto& [_, each] : state().pinned) total += each.is_released ? 0 : each.bytes;
  return total;
}

void defer(const Work& work, const void* block, const void* pinned, std::function<void()> copy) {
  Lock lock(state_mutex());
  auto memory = base_of(state().pinned, pinned);
  state().pinned[memory].copies += 1;
  auto written = block == nullptr ? nullptr : base_of(state().blocks, block);
  state().deferred.push_back({work, written, memory, std::move(copy)});
}

} // namespace fake_cuda

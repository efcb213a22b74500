// Vector clocks of streams, events and the host: which access to device memory is ordered after which.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace fake_cuda {

// device << 40 | stream id; stream id 0 is the device's default stream.
using StreamKey = int64_t;
// A point in the work of a stream, or of the host.
struct Clock {
  std::map<StreamKey, uint64_t> finished; // for each stream, how much of its work has finished for certain
  double ms = 0; // simulated time of the device, or of the host
};

inline StreamKey stream_key(int device, int64_t stream_id) {
  return (int64_t{device} << 40) | stream_id;
}

// Protects everything below. While it is held, nothing may need Python's GIL: no warning, no object seen by Python.
std::recursive_mutex& state_mutex();
using Lock = std::lock_guard<std::recursive_mutex>;

// One piece of work on a stream.
struct Work {
  StreamKey stream;
  uint64_t time;
  const char* name; // outlives the process's tests: a literal or the name of an operator
};

// Parts of a device that work at the same time, each at one thing after the other. Kernels are taken to fill the device.
enum class Engine { kNone, kCompute, kCopyIn, kCopyOut };

// Starts work on a stream: ordered after the stream's earlier work and after all that the host has waited for. The host
// needs time to issue what takes time, and the work begins when its engine is free.
Work launch(StreamKey stream, const char* name, double ms, Engine engine = Engine::kNone);
// Whether work has finished for certain at a point of time.
bool has_finished(const Clock& clock, const Work& work);
// How often work of this name has been launched in this process.
int64_t launch_count(const std::string& name);
// Lengthens the last work of a stream, a kernel.
void prolong(const Work& work, double ms);
// What has finished once the stream has reached this point.
Clock record(StreamKey stream);
void stream_waits(StreamKey stream, const Clock& clock);
// These wait for other ranks, too, where the work needs a collective's result: call them without the lock.
void host_waits(const Clock& clock);
void host_waits_for_device(int device);
// Whether no stream that has work at this point of time was given more of it since.
bool is_latest(const Clock& clock);
// Whether all work has ended; the host then knows that it has.
bool has_ended(const Clock& clock);
// Throws, as CUDA does, if the host has not waited for both.
double elapsed_ms(const Clock& first, const Clock& last);

// Device memory, cached per stream as CUDA's caching allocator does; filled with 0xff, which reads as NaN.
void* allocate(int device, StreamKey stream, size_t bytes);
// As `allocate`, for memory that nobody reads: it is not filled.
void* allocate_workspace(int device, StreamKey stream, size_t bytes);
void release(void* block);
// Lets a released block be used again, after the last pending work that touched it.
void reuse_if_released(void* block);
void release_cached();
// Tensor.record_stream: the memory is not reused before the stream's work until its release.
void record_use(const void* address, StreamKey stream);
// Notes that work reads or writes the block of an address, and reports an access that nothing orders after another's.
void touch(const void* address, const Work& work, bool is_write);
int device_of(const void* address); // -1: no device memory
void* block_of(const void* address); // nullptr: no device memory

// A process has a context, of hundreds of megabytes, on each device that it makes current, allocates memory of, or asks
// about a stream or an event. With FAKE_CUDA_ONE_CONTEXT in its environment, a second one is reported.
void make_context(int device);
bool has_context(int device);

struct Statistics {
  size_t current, peak, total_allocations;
};
Statistics statistics(int device);
void reset_peak(int device);

// Appends a line to the file that tests read, which fails the test; one line of a text per process.
void report(const std::string& text);

// Page-locked host memory. It is kept until the copies that use it have run.
void* allocate_pinned(size_t bytes);
void release_pinned(void* memory);
bool is_pinned(const void* address);
size_t pinned_bytes();

// Runs a copy between pinned and device memory as late as a device may: when its result is needed.
//   to the device: when other work touches the device's block, or the host waits for the stream.
//   to the host: when the host waits for the stream.
void defer(const Work& work, const void* block, const void* pinned, std::function<void()> copy);

} // namespace fake_cuda

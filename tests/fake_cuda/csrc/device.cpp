// What torch's C++ asks of a device: allocators, guard, streams, events, generators, hooks.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

namespace fake_cuda {
namespace {

constexpr int kMostDevices = 8;

thread_local int the_device = 0;
thread_local int64_t the_stream_ids[kMostDevices] = {};
std::atomic<int64_t> next_stream_id{1};
std::atomic<int> the_sync_debug_mode{0};
std::atomic<int64_t> the_host_waits{0};
std::atomic<double> the_memory_fractions[kMostDevices] = {1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0};

int physical_devices() {
  auto count = std::getenv("FAKE_CUDA_DEVICES");
  return count == nullptr ? 2 : std::clamp(std::atoi(count), 1, kMostDevices);
}

// As the CUDA driver reads the variable: the first entry that is no device ends the list.
std::vector<int> visible_devices() {
  std::vector<int> found;
  auto mask = std::getenv("CUDA_VISIBLE_DEVICES");
  if (mask == nullptr) {
    for (int i = 0; i < physical_devices(); ++i) found.push_back(i);
    return found;
  }
  for (const char* rest = mask; *rest != '\0';) {
    char* end = nullptr;
    auto device = std::strtol(rest, &end, 10);
    if (end == rest || device < 0 || device >= physical_devices()) break;
    for (auto each : found) {
      if (each == device) return {};
    }
    found.push_back(static_cast<int>(device));
    rest = *end == ',' ? end + 1 : end + std::strlen(end);
  }
  return found;
}

// Read once, at the first use, as the driver does.
const std::vector<int>& devices() {
  static std::vector<int> found = visible_devices();
  return found;
}

int index_of(c10::Device device) {
  return device.has_index() ? device.index() : the_device;
}

StreamKey key_of(const c10::Stream& stream) {
  return stream_key(stream.device_index(), stream.id());
}

c10::Stream make_stream(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)), id);
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto device = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(the_device));
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    make_context(the_device);
    check_memory(the_device, bytes);
    auto block = fake_cuda::allocate(the_device, current_stream(the_device), bytes);
    return {block, block, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override { release_cached(); }
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    record_use(memory.get(), key_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return {kMemory - statistics(device).current, kMemory};
  }
} the_device_allocator;

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto memory = allocate_pinned(bytes);
    return {memory, memory, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
} the_pinned_allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device getDevice() const override { return {c10::kCUDA, static_cast<c10::DeviceIndex>(the_device)}; }
  void setDevice(c10::Device device) const override { set_current_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { maybe_exchange_device(index_of(device)); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(fake_cuda::device_count());
  }

  c10::Stream getStream(c10::Device device) const override {
    return make_stream(index_of(device), the_stream_ids[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return make_stream(index_of(device), 0); }
  // Unlike CUDA's pool of 32, no stream is given out twice: no order comes from a coincidence.
  c10::Stream getNewStream(c10::Device device, int) const override {
    make_context(index_of(device));
    return make_stream(index_of(device), next_stream_id++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    the_stream_ids[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream& stream) const override {
    make_context(stream.device_index());
    return has_ended(fake_cuda::record(key_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check_sync("a stream's synchronize");
    make_context(stream.device_index());
    host_waits(fake_cuda::record(key_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    check_sync("a device's synchronize");
    make_context(device < 0 ? the_device : device);
    host_waits_for_device(device < 0 ? the_device : device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    make_context(stream.device_index());
    if (*event == nullptr) *event = new Clock;
    *static_cast<Clock*>(*event) = fake_cuda::record(key_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) stream_waits(key_of(stream), *static_cast<Clock*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || has_ended(*static_cast<Clock*>(event));
  }
  // Only the wait for an event after which nothing was launched lets the device run dry.
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    auto& clock = *static_cast<Clock*>(event);
    if (is_latest(clock)) check_sync("an event's synchronize");
    host_waits(clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    return elapsed_ms(*static_cast<Clock*>(first), *static_cast<Clock*>(last));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_use(memory.get(), key_of(stream));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// CPU random numbers with a state of their own for each device.
struct GeneratorImpl final : at::CPUGeneratorImpl {
  explicit GeneratorImpl(int device) {
    device_ = c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
  GeneratorImpl* clone_impl() const override {
    auto copy = new GeneratorImpl(device_.index());
    copy->set_state(*get_state());
    return copy;
  }
};

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return fake_cuda::device_count() > 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return hasCUDA(); }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return has_context(device); }
  int getNumGPUs() const override { return fake_cuda::device_count(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(fake_cuda::device_count()); }
  c10::DeviceIndex current_device() const override { return static_cast<c10::DeviceIndex>(the_device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = current_device();
    if (device >= 0) set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(maybe_exchange_device(device));
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &the_pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &the_device_allocator; }
  at::Device getDeviceFromPtr(void* address) const override {
    auto device = device_of(address);
    TORCH_CHECK(device >= 0, "The specified pointer resides on host memory and is not registered with any CUDA device.");
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(device)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(device < 0 ? the_device : device);
  }
  void deviceSynchronize(c10::DeviceIndex device) const override { host_waits_for_device(device); }
};

// The bytes of CUBLAS_WORKSPACE_CONFIG, such as ":4096:8": pairs of KiB and a number. Default: that of a GPU of sm_90.
size_t workspace_bytes() {
  auto text = std::getenv("CUBLAS_WORKSPACE_CONFIG");
  if (text == nullptr) return size_t{32} << 20;
  size_t total = 0;
  unsigned kib = 0, count = 0;
  int length = 0;
  for (; std::sscanf(text, ":%u:%u%n", &kib, &count, &length) == 2; text += length) total += size_t{kib} * count << 10;
  return total;
}

// As torch does before each product where algorithms are to be deterministic.
void check_cublas_config() {
  auto& context = at::globalContext();
  auto text = std::getenv("CUBLAS_WORKSPACE_CONFIG");
  auto is_fixed = text != nullptr && (std::string(text) == ":4096:8" || std::string(text) == ":16:8");
  if (!context.deterministicAlgorithms() || is_fixed) return;
  auto message =
      "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
      "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses CuBLAS "
      "and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set an environment variable "
      "before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8.";
  TORCH_CHECK(context.deterministicAlgorithmsWarnOnly(), message);
  TORCH_WARN(message);
}

} // namespace

// Each stream has a workspace of its own, which torch allocates at its first product and keeps (CublasHandlePool.cpp).
void use_cublas() {
  check_cublas_config();
  static auto& streams = *new std::set<StreamKey>;
  Lock lock(state_mutex());
  auto stream = current_stream(the_device);
  if (!streams.insert(stream).second) return;
  auto bytes = workspace_bytes();
  if (bytes == 0) return;
  check_memory(the_device, bytes);
  allocate_workspace(the_device, stream, bytes);
}

int device_count() {
  return static_cast<int>(devices().size());
}

int physical_device(int device) {
  return devices().at(device);
}

int current_device() {
  return the_device;
}

void set_memory_fraction(int device, double fraction) {
  the_memory_fractions[device] = fraction;
}

double memory_fraction(int device) {
  return the_memory_fractions[device];
}

void check_memory(int device, size_t bytes) {
  auto limit = static_cast<size_t>(kMemory * memory_fraction(device));
  auto used = statistics(device).current;
  TORCH_CHECK_WITH(
      OutOfMemoryError, used + bytes <= limit, "CUDA out of memory. Tried to allocate ", bytes / 1048576.0, " MiB. GPU ",
      device, " has a total capacity of ", kMemory / 1048576.0, " MiB of which ", (limit > used ? limit - used : 0) / 1048576.0,
      " MiB is free.");
}

// As c10::cuda::SetDevice and MaybeExchangeDevice: a device that is current already, or is only returned to, gets no
// context.
void set_current_device(int device) {
  TORCH_CHECK(device < device_count(), "CUDA error: invalid device ordinal");
  if (device < 0 || device == the_device) return;
  make_context(device);
  the_device = device;
}

int maybe_exchange_device(int device) {
  auto before = the_device;
  if (device >= 0) the_device = device;
  return before;
}

StreamKey current_stream(int device) {
  return stream_key(device, the_stream_ids[device]);
}

c10::Allocator* device_allocator() {
  return &the_device_allocator;
}

const at::Generator& default_generator(int device) {
  static auto& all = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (int i = 0; i < device_count(); ++i) made.push_back(at::make_generator<GeneratorImpl>(i));
    return made;
  }());
  return all.at(device < 0 ? the_device : device);
}

void set_sync_debug_mode(int mode) {
  if (mode != 0) {
    TORCH_WARN_ONCE(
        "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations");
  }
  the_sync_debug_mode = mode;
}

int64_t host_wait_count() {
  return the_host_waits;
}

int sync_debug_mode() {
  return the_sync_debug_mode;
}

void check_sync(const char* what) {
  ++the_host_waits;
  TORCH_CHECK(the_sync_debug_mode != 2, "called a synchronizing CUDA operation: ", what);
  if (the_sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation: ", what);
}

void install_hooks() {
  c10::SetAllocator(c10::kCUDA, &the_device_allocator, /*priority=*/100);
  // torch keeps the object that it made before this library was loaded: give it the methods of ours.
  static auto& hooks = *new Hooks{at::CUDAHooksArgs{}};
  auto* existing = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(existing) = *reinterpret_cast<void**>(&hooks);
}

} // namespace fake_cuda

REGISTER_HOST_ALLOCATOR(at::kCUDA, &fake_cuda::the_pinned_allocator)

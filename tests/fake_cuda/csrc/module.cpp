// What the Python half of the pretended CUDA asks for.
#define USE_DISTRIBUTED
#define USE_C10D
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

#include "durations.h"
#include "tensors.h"

namespace c10d {

// Without one, DDP refuses the device.
struct FakeCudaTimer final : Timer {
  explicit FakeCudaTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    return getTimeRef(end) - getTimeRef(start);
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, FakeCudaTimer);

} // namespace c10d

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace fake_cuda;
  auto index = [](int device) { return device < 0 ? current_device() : device; };
  m.def("install_hooks", &install_hooks);
  m.def("device_count", &device_count);
  m.def("physical_device", &physical_device);
  m.def("current_device", &current_device);
  m.def("set_current_device", &set_current_device);
  m.def("maybe_exchange_device", &maybe_exchange_device);
  m.def("has_context", &has_context);
  m.def("default_generator", &default_generator);
  m.def("set_sync_debug_mode", &set_sync_debug_mode);
  m.def("sync_debug_mode", &sync_debug_mode);
  m.def("synchronize", [index](int device) {
    check_sync("torch.cuda.synchronize");
    host_waits_for_device(index(device));
  });
  m.def("set_rates", &set_rates);
  m.def("set_speed", &set_speed);
  m.def("speed", &speed);
  m.def("set_link", &set_link);
  m.def("sleep", [](double ms) { launch(current_stream(current_device()), "sleep", ms); });
  m.def("elapsed_ms", [](int64_t first, int64_t last) { // the ids of two events
    return elapsed_ms(*reinterpret_cast<Clock*>(first), *reinterpret_cast<Clock*>(last));
  });
  m.def("resize_storage", &resize_storage);
  m.def("sent", &sent);
  m.def("received", &received);
  m.def("set_memory_fraction", &set_memory_fraction);
  m.def("memory_fraction", &memory_fraction);
  m.def("release_cached", &release_cached);
  m.def("reset_peak", [index](int device) { reset_peak(index(device)); });
  m.def("statistics", [index](int device) {
    auto found = statistics(index(device));
    return pybind11::make_tuple(found.current, found.peak, found.total_allocations);
  });
}

// What the Python half of the pretended CUDA asks for.
#define USE_DISTRIBUTED
#define USE_C10D
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include "durations.h"
#include "groups.h"
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

namespace {

using namespace fake_cuda;

// What torch's Python asks of a group of NCCL.
void define_groups(pybind11::module_& m) {
  using Base = c10d::Backend::Options;
  using Options = NcclGroup::Options;
  auto copied = [](const Options& options, const pybind11::dict&) { return c10::make_intrusive<Options>(options); };
  pybind11::class_<DeviceGroup, c10d::Backend, c10::intrusive_ptr<DeviceGroup>>(m, "DeviceGroup")
      .def(pybind11::init<c10::intrusive_ptr<c10d::Backend>, bool, c10::intrusive_ptr<Base>>())
      .def_property_readonly("options", &DeviceGroup::getBackendOptions)
      .def("abort", &DeviceGroup::abort, pybind11::call_guard<pybind11::gil_scoped_release>())
      .def("_set_default_timeout", &DeviceGroup::setTimeout);
  auto group = pybind11::class_<NcclGroup, DeviceGroup, c10::intrusive_ptr<NcclGroup>>(m, "ProcessGroupNCCL");
  pybind11::class_<Options, Base, c10::intrusive_ptr<Options>>(group, "Options")
      .def(pybind11::init<bool>(), pybind11::arg("is_high_priority_stream") = false)
      .def("__deepcopy__", copied)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream)
      .def_readwrite("split_from", &Options::split_from)
      .def_readwrite("split_color", &Options::split_color);
  group
      .def(
          pybind11::init<const c10::intrusive_ptr<c10d::Store>&, int, int, const c10::intrusive_ptr<Base>&>(),
          pybind11::call_guard<pybind11::gil_scoped_release>())
      .def_property_readonly("uid", &NcclGroup::getID)
      .def("perform_nocolor_split", [](NcclGroup&, const c10::Device&) {})
      .def("comm_split_count", [](NcclGroup&) { return 0; })
      .def("_group_start", [](NcclGroup&) {})
      .def("_group_end", [](NcclGroup&) {})
      .def("_add_ephemeral_timeout", [](NcclGroup&, std::chrono::milliseconds) {})
      .def("_is_initialized", [](NcclGroup&) { return true; });
  m.def("recorded", [] {
    pybind11::list all;
    for (auto& each : recorded()) {
      pybind11::dict entry;
      auto is_completed = false;
      {
        Lock lock(state_mutex());
        is_completed = each.task->is_done && each.task->error.empty();
      }
      entry["process_group"] = pybind11::make_tuple(each.group, each.description);
      entry["profiling_name"] = each.name;
      entry["collective_seq_id"] = each.number;
      entry["is_p2p"] = each.is_p2p;
      entry["time_created_ns"] = each.created_ns;
      entry["input_dtypes"] = each.dtypes;
      entry["input_sizes"] = each.sizes;
      entry["state"] = is_completed ? "completed" : "scheduled";
      entry["retired"] = is_completed;
      all.append(entry);
    }
    return all;
  });
}

} // namespace

// This library is also the one that a process of CUDA has loaded as libcudart, whose functions ctypes may call.
extern "C" __attribute__((visibility("default"))) int cudaThreadExchangeStreamCaptureMode(int*) {
  fake_cuda::make_context(fake_cuda::current_device());
  return 0;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  define_groups(m);
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
  m.def("host_wait_count", &host_wait_count);
  m.def("launch_count", &launch_count);
  m.def("pinned_bytes", &pinned_bytes);
  m.def("sleep", [](double ms) { launch(current_stream(current_device()), "sleep", ms, Engine::kCompute); });
  m.def("elapsed_ms", [](int64_t first, int64_t last) { // the ids of two events
    return elapsed_ms(*reinterpret_cast<Clock*>(first), *reinterpret_cast<Clock*>(last));
  });
  m.def("resize_storage", &resize_storage);
  m.def("set_memory_fraction", &set_memory_fraction);
  m.def("memory_fraction", &memory_fraction);
  m.def("release_cached", &release_cached);
  m.def("reset_peak", [index](int device) { reset_peak(index(device)); });
  m.def("statistics", [index](int device) {
    auto found = statistics(index(device));
    return pybind11::make_tuple(found.current, found.peak, found.total_allocations);
  });
}

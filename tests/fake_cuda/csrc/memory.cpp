// The operators that allocate, resize and copy device memory.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "durations.h"
#include "pending.h"
#include "tensors.h"

namespace fake_cuda {
namespace {

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(at::device_or_default(device));
  TORCH_CHECK(!at::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(size, device_allocator(), kKeys, at::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(at::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, at::dtype_or_default(dtype));
}

} // namespace

void resize_storage(const Tensor& tensor, size_t bytes) {
  auto& storage = tensor.storage();
  const c10::DeviceGuard guard(tensor.device());
  auto memory = device_allocator()->allocate(bytes);
  auto kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    wait_for({{block_of(storage.data()), false}});
    auto work = launch(stream_of(tensor), "resize_", launch_ms());
    touch(storage.data(), work, false);
    touch(memory.get(), work, true);
    std::memcpy(memory.get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat> format) {
  auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  if (self.sizes() == size) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value()) impl->empty_tensor_restride(*format);
  auto bytes = (self.storage_offset() + self.numel()) * self.itemsize();
  if (self.storage().nbytes() < bytes) resize_storage(self, bytes);
  return self;
}

namespace {

Tensor& set_storage_offset(
    Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  auto length = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(source), 0, {c10::SymInt(length)}, {c10::SymInt(1)});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

void record_stream(Tensor& self, c10::Stream stream) {
  record_use(self.storage().data(), stream_key(stream.device_index(), stream.id()));
}

at::Scalar item(const Tensor& self) {
  check_sync("item");
  auto work = launch(stream_of(self), "item", launch_ms(), Engine::kCopyOut);
  touch_tensor(self, work, false);
  host_waits(record(work.stream));
  return host_alias(self).item();
}

double transfer_ms(const Tensor& to, const Tensor& from) {
  auto device = [](const Tensor& each) { return each.is_cuda() ? each.device().index() : kHost; };
  return fake_cuda::transfer_ms(device(from), device(to), static_cast<double>(to.numel() * to.itemsize()));
}

// Copies on a device or between devices, as soon as both sides have their values.
void copy_values(const Tensor& to, const Tensor& from, const Work& work) {
  touch_tensor(from, work, false);
  touch_tensor(to, work, true);
  std::vector<Access> accesses{access_of(from, false), access_of(to, true)};
  if (!is_pending(accesses)) {
    Lock lock(state_mutex());
    host_alias(to).copy_(host_alias(from));
    return;
  }
  enqueue(work, accesses, [to = host_alias(to), from = host_alias(from)]() mutable {
    const KernelGuard kernels;
    to.copy_(from);
  });
}

// Both devices' current streams are ordered with the copy, as in CUDA.
void copy_between_devices(const Tensor& to, const Tensor& from) {
  auto source = stream_of(from), target = stream_of(to);
  stream_waits(source, record(target));
  copy_values(to, from, launch(source, "copy_ between devices", transfer_ms(to, from), Engine::kCopyOut));
  stream_waits(target, record(source));
}

void copy_on_device(const Tensor& to, const Tensor& from) {
  auto ms = launch_ms() + kernel_ms(to.device().index(), {}, 0, 2.0 * to.numel() * to.itemsize());
  copy_values(to, from, launch(stream_of(to), "copy_", ms, Engine::kCompute));
}

void copy_to_device(const Tensor& to, const Tensor& from, bool is_deferred) {
  auto work = launch(stream_of(to), "copy_ to the device", transfer_ms(to, from), Engine::kCopyIn);
  touch_tensor(to, work, true);
  wait_for({access_of(to, true)});
  if (!is_deferred) {
    host_waits(record(work.stream));
    host_alias(to).copy_(from);
    return;
  }
  auto copy = [to = host_alias(to), from = host_alias(from)]() mutable {
    const KernelGuard kernels;
    to.copy_(from);
  };
  defer(work, to.storage().data(), from.storage().data(), std::move(copy));
}

void copy_to_host(const Tensor& to, const Tensor& from, bool is_deferred) {
  auto work = launch(stream_of(from), "copy_ to the host", transfer_ms(to, from), Engine::kCopyOut);
  touch_tensor(from, work, false);
  if (!is_deferred) {
    host_waits(record(work.stream));
    host_alias(to).copy_(host_alias(from));
    return;
  }
  // The values are those of now; a host that has waited for the stream has waited for the task, too.
  auto values = std::make_shared<Tensor>();
  auto keep = [values, from = host_alias(from)] {
    const KernelGuard kernels;
    *values = from.clone();
  };
  is_pending({access_of(from, false)}) ? (void)enqueue(work, {access_of(from, false)}, keep) : keep();
  if (to.is_non_overlapping_and_dense()) std::memset(to.mutable_data_ptr(), 0xff, to.nbytes());
  defer(work, nullptr, to.storage().data(), [to = host_alias(to), values]() mutable {
    const KernelGuard kernels;
    to.copy_(*values);
  });
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  const KernelGuard kernels;
  auto from = source.sizes() == self.sizes() ? source : source.expand_as(self);
  if (self.is_cuda() && from.is_cuda()) {
    self.device() == from.device() ? copy_on_device(self, from) : copy_between_devices(self, from);
    return self;
  }
  auto& host = self.is_cuda() ? from : self;
  auto is_deferred = non_blocking && is_pinned(host.storage().data());
  if (!is_deferred) check_sync(self.is_cuda() ? "a copy to the device" : "a copy to the host");
  self.is_cuda() ? copy_to_device(self, from, is_deferred) : copy_to_host(self, from, is_deferred);
  return self;
}

void foreach_copy_(at::TensorList self, at::TensorList source, bool non_blocking) {
  for (size_t i = 0; i < self.size(); ++i) {
    auto to = self[i];
    to.copy_(source[i], non_blocking);
  }
}

} // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_local_scalar_dense", item);
  m.impl("copy_", copy_);
  m.impl("_foreach_copy_", foreach_copy_);
}

} // namespace fake_cuda

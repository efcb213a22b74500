// The operators that allocate, resize and copy device memory.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "durations.h"
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
    auto work = launch(stream_of(tensor), "resize_", launch_ms());
    touch(storage.data(), work, false);
    touch(memory.get(), work, true);
    std::memcpy(memory.get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

Tensor sent(const Tensor& tensor) {
  Lock lock(state_mutex());
  auto work = launch(stream_of(tensor), "a collective", launch_ms());
  touch_tensor(tensor, work, false);
  return host_alias(tensor).clone();
}

void received(const Tensor& tensor, const Tensor& values) {
  const KernelGuard kernels;
  Lock lock(state_mutex());
  auto work = launch(stream_of(tensor), "a collective", launch_ms());
  touch_tensor(tensor, work, true);
  host_alias(tensor).copy_(values);
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
  Lock lock(state_mutex());
  auto work = launch(stream_of(self), "item", launch_ms());
  touch_tensor(self, work, false);
  host_waits(record(work.stream));
  return host_alias(self).item();
}

double transfer_ms(const Tensor& to, const Tensor& from) {
  auto device = [](const Tensor& each) { return each.is_cuda() ? each.device().index() : kHost; };
  return fake_cuda::transfer_ms(device(from), device(to), static_cast<double>(to.numel() * to.itemsize()));
}

// Both devices' current streams are ordered with the copy, as in CUDA.
void copy_between_devices(const Tensor& to, const Tensor& from) {
  auto source = stream_of(from), target = stream_of(to);
  stream_waits(source, record(target));
  auto work = launch(source, "copy_ between devices", transfer_ms(to, from));
  touch_tensor(from, work, false);
  touch_tensor(to, work, true);
  host_alias(to).copy_(host_alias(from));
  stream_waits(target, record(source));
}

void copy_to_device(const Tensor& to, const Tensor& from, bool is_deferred) {
  auto work = launch(stream_of(to), "copy_ to the device", transfer_ms(to, from));
  touch_tensor(to, work, true);
  if (!is_deferred) {
    host_alias(to).copy_(from);
    host_waits(record(work.stream));
    return;
  }
  auto copy = [to = host_alias(to), from = host_alias(from)]() mutable {
    const KernelGuard kernels;
    to.copy_(from);
  };
  defer(work, to.storage().data(), from.storage().data(), std::move(copy));
}

void copy_to_host(const Tensor& to, const Tensor& from, bool is_deferred) {
  auto work = launch(stream_of(from), "copy_ to the host", transfer_ms(to, from));
  touch_tensor(from, work, false);
  if (!is_deferred) {
    host_alias(to).copy_(host_alias(from));
    host_waits(record(work.stream));
    return;
  }
  auto values = host_alias(from).clone();
  if (to.is_non_overlapping_and_dense()) std::memset(to.mutable_data_ptr(), 0xff, to.nbytes());
  defer(work, nullptr, to.storage().data(), [to = host_alias(to), values]() mutable {
    const KernelGuard kernels;
    to.copy_(values);
  });
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  const KernelGuard kernels;
  auto from = source.sizes() == self.sizes() ? source : source.expand_as(self);
  if (self.is_cuda() && from.is_cuda()) {
    Lock lock(state_mutex());
    if (self.device() != from.device()) {
      copy_between_devices(self, from);
      return self;
    }
    auto device = self.device().index();
    auto ms = launch_ms() + kernel_ms(device, {}, 0, 2.0 * self.numel() * self.itemsize());
    auto work = launch(stream_of(self), "copy_", ms);
    touch_tensor(from, work, false);
    touch_tensor(self, work, true);
    host_alias(self).copy_(host_alias(from));
    return self;
  }
  auto& host = self.is_cuda() ? from : self;
  auto is_deferred = non_blocking && is_pinned(host.storage().data());
  if (!is_deferred) check_sync(self.is_cuda() ? "a copy to the device" : "a copy to the host");
  Lock lock(state_mutex());
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

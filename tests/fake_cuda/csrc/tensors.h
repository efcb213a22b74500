// Tensors that share memory between a device and the CPU's kernels.
#pragma once
#include <ATen/core/Tensor.h>

#include "device.h"
#include "pending.h"

namespace fake_cuda {

using at::Tensor;

const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

// CPU kernels run for the device: unseen by autograd, by autocast and by modes of Python, in which a deferred copy may run.
struct KernelGuard {
  c10::impl::ExcludeDispatchKeyGuard guard{
      c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

// A CPU tensor over the memory of a tensor, which must outlive it. No Python object ever belongs to it.
inline Tensor host_alias(const Tensor& tensor) {
  auto& storage = tensor.storage();
  c10::DataPtr data(const_cast<void*>(storage.data()), c10::Device(c10::kCPU));
  c10::Storage shared(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(shared), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

// A view of a device tensor with the geometry of a CPU tensor.
inline Tensor device_view(const Tensor& base, const Tensor& geometry) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), geometry.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(geometry.sizes(), geometry.strides(), geometry.storage_offset());
  if (geometry.is_conj()) view._set_conj(true);
  if (geometry.is_neg()) view._set_neg(true);
  return view;
}

inline void touch_tensor(const Tensor& tensor, const Work& work, bool is_write) {
  if (tensor.numel() > 0) touch(tensor.storage().data(), work, is_write);
}

inline Access access_of(const Tensor& tensor, bool is_write) {
  return {block_of(tensor.storage().data()), is_write};
}

inline StreamKey stream_of(const Tensor& tensor) {
  return current_stream(tensor.device().index());
}

// UntypedStorage.resize_, of the storage of a tensor: new memory starts as NaN, and none is left for 0 bytes.
void resize_storage(const Tensor& tensor, size_t bytes);
// Tensor.resize_: never shrinks the memory.
const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef symbolic, std::optional<at::MemoryFormat> format);

} // namespace fake_cuda

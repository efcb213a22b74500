// All other operators: each is computed at once by its CPU kernel, on tensors that share the memory of the device's.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "durations.h"
#include "pending.h"
#include "tensors.h"

namespace fake_cuda {
namespace {

using c10::IValue;

[[noreturn]] void refuse_devices(c10::Device first, c10::Device second, const std::string& name) {
  TORCH_CHECK(
      false,
      "Expected all tensors to be on the same device, but found at least two devices, ",
      first, " and ", second, "! (when checking the operator ", name, ")");
}

// CUDA's kernels of these take tensors on the CPU, too: indices, lengths.
const std::set<std::string> kTakesHostTensors{
    "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_unsafe_index_put", "aten::_pack_padded_sequence", "aten::_pack_padded_sequence_backward",
    "aten::_pad_packed_sequence"};
// The host waits for the device to learn the size of the result.
const std::set<std::string> kSynchronizes{
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::equal", "aten::bincount", "aten::repeat_interleave"};

// Products of matrices, which cuBLAS computes.
const std::set<std::string> kProducts{
    "aten::mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm", "aten::baddbmm_", "aten::addbmm", "aten::mv",
    "aten::addmv", "aten::addmv_", "aten::dot", "aten::_addmm_activation"};

bool is_half(const IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return false;
  auto dtype = value.toTensor().scalar_type();
  return dtype == at::kHalf || dtype == at::kBFloat16;
}

// Runs the CPU's kernel. Its products of 16 bits are a hundred times slower than in fp32, in which GPUs add them, too.
// torch calls them by the overload whose last argument is the output.
void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  auto is_product = kProducts.count(op.schema().name()) > 0 && op.schema().overload_name() == "out";
  if (!is_product || !is_half(stack.back())) return op.redispatchBoxed(keys, &stack);
  auto output = stack.back().toTensor();
  for (auto each = stack.end() - op.schema().arguments().size(); each != stack.end(); ++each) {
    if (is_half(*each)) *each = each->toTensor().to(at::kFloat);
  }
  op.redispatchBoxed(keys, &stack);
  output.copy_(stack.back().toTensor());
  stack.back() = output;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(*stack), arguments_(op.schema().arguments()), begin_(stack->size() - arguments_.size()) {}

  void run() {
    find_device();
    const c10::DeviceGuard guard(device_);
    const KernelGuard kernels;
    auto synchronizes = kSynchronizes.count(name()) > 0;
    if (synchronizes) check_sync(name().c_str());
    if (kProducts.count(name()) > 0) use_cublas();
    auto is_kernel = !returns_view();
    auto operations = is_kernel ? fake_cuda::operations(name(), given()) : Operations{};
    auto engine = is_kernel ? Engine::kCompute : Engine::kNone;
    work_ = launch(current_stream(device_.index()), name().c_str(), is_kernel ? launch_ms() : 0, engine);
    originals_ = given().vec();
    for (size_t i = 0; i < arguments_.size(); ++i) argument(i) = to_host(argument(i), arguments_[i].alias_info());
    if (synchronizes) host_waits(record(work_.stream));
    auto& returns = op_.schema().returns();
    if (is_kernel && is_pending(accesses_)) {
      if (!synchronizes && compute_later()) {
        prolong(work_, kernel_ms(device_.index(), operations, elements(returns.size()), bytes(returns.size())));
        return;
      }
      wait_for(accesses_);
    }
    compute();
    if (is_kernel) prolong(work_, kernel_ms(device_.index(), operations, elements(returns.size()), bytes(returns.size())));
    for (auto each = stack_.end() - returns.size(); each != stack_.end(); ++each) *each = to_device(std::move(*each));
  }

 private:
  struct Passed {
    Tensor original, host;
    bool is_fresh_output; // empty, so that the kernel may resize it
  };

  // A view of an argument: no kernel runs.
  bool returns_view() const {
    auto& returns = op_.schema().returns();
    auto* alias = returns.empty() ? nullptr : returns[0].alias_info();
    return alias != nullptr && !alias->isWrite();
  }

  c10::ArrayRef<IValue> given() const { return c10::ArrayRef<IValue>(stack_.data() + begin_, arguments_.size()); }

  double elements(size_t returns) const {
    auto first = stack_.end() - returns;
    return returns > 0 && first->isTensor() && first->toTensor().defined() ? first->toTensor().numel() : 0;
  }

  // What the kernel reads and writes. An output that was passed is counted there, but what changes in place twice.
  double bytes(size_t returns) const {
    auto size = [](const Tensor& each) { return each.defined() ? static_cast<double>(each.numel() * each.itemsize()) : 0; };
    double total = 0;
    for (auto& each : passed_) total += size(each.host);
    for (auto each = stack_.end() - returns; each != stack_.end(); ++each) {
      if (each->isTensor() && (name().back() == '_' || !was_passed(each->toTensor()))) total += size(each->toTensor());
    }
    return total;
  }

  bool was_passed(const Tensor& result) const {
    return std::any_of(passed_.begin(), passed_.end(), [&](auto& each) { return each.host.is_same(result); });
  }

  const std::string& name() const { return op_.schema().name(); }
  IValue& argument(size_t i) { return stack_[begin_ + i]; }

  void find_device() {
    std::optional<c10::Device> found, host;
    auto visit = [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      if (tensor.is_cpu() && tensor.dim() > 0) host = tensor.device();
      if (!tensor.is_cuda()) return;
      if (found.has_value() && *found != tensor.device()) refuse_devices(*found, tensor.device(), name());
      found = tensor.device();
    };
    for (size_t i = 0; i < arguments_.size(); ++i) {
      auto& value = argument(i);
      if (value.isTensor()) visit(value.toTensor());
      if (value.isTensorList()) {
        for (auto& each : value.toTensorVector()) visit(each);
      }
      if (value.isOptionalTensorList()) {
        for (auto each : value.toOptionalTensorVector()) visit(each.value_or(Tensor()));
      }
      if (value.isDevice()) target_ = value.toDevice();
    }
    if (found.has_value() && host.has_value() && kTakesHostTensors.count(name()) == 0)
      refuse_devices(*found, *host, name());
    if (!found.has_value() && target_.has_value() && target_->is_cuda() && target_->has_index()) found = target_;
    device_ = found.value_or(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(current_device())));
  }

  Tensor to_host(const Tensor& tensor, const c10::AliasInfo* alias) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    auto is_write = alias != nullptr && alias->isWrite();
    auto is_view = alias != nullptr && !is_write; // shares the memory with the result, and neither reads nor writes it
    if (!is_view) touch_tensor(tensor, work_, is_write);
    if (!is_view && tensor.numel() > 0) accesses_.push_back(access_of(tensor, is_write));
    auto is_fresh_output = is_write && tensor.numel() == 0;
    auto host = is_fresh_output ? at::empty(tensor.sizes(), tensor.options().device(c10::kCPU)) : host_alias(tensor);
    passed_.push_back({tensor, host, is_fresh_output});
    return host;
  }

  IValue to_host(const IValue& value, const c10::AliasInfo* alias) {
    if (value.isTensor()) return to_host(value.toTensor(), alias);
    if (value.isTensorList()) {
      c10::List<Tensor> moved;
      for (auto& each : value.toTensorVector()) moved.push_back(to_host(each, alias));
      return moved;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> moved;
      for (auto each : value.toOptionalTensorVector())
        moved.push_back(each ? std::optional<Tensor>(to_host(*each, alias)) : std::nullopt);
      return moved;
    }
    if (value.isDevice()) return c10::Device(c10::kCPU);
    if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      generator_ = value.toGenerator();
      return IValue();
    }
    return value;
  }

  // Random numbers come from the device's generator: its state is lent to the CPU's.
  void compute() {
    if (!generator_.defined() && op_.hasTag(at::Tag::nondeterministic_seeded))
      generator_ = default_generator(device_.index());
    if (!generator_.defined()) return run_kernel(op_, stack_);
    static std::mutex mutex;
    std::lock_guard<std::mutex> lock(mutex);
    auto host = at::detail::getDefaultCPUGenerator();
    auto before = host.get_state();
    host.set_state(generator_.get_state());
    try {
      run_kernel(op_, stack_);
    } catch (...) {
      host.set_state(before);
      throw;
    }
    generator_.set_state(host.get_state());
    host.set_state(before);
  }

  // Lets the kernel run when the collectives have ended whose results it reads. The host needs to know what it returns:
  // arguments that are written, or new tensors, whose sizes the operator's kernel for torch.device("meta") tells.
  bool compute_later() {
    auto is_random = generator_.defined() || op_.hasTag(at::Tag::nondeterministic_seeded);
    auto resizes = std::any_of(passed_.begin(), passed_.end(), [](auto& each) { return each.is_fresh_output; });
    if (is_random || resizes) return false;
    std::vector<IValue> results;
    std::vector<Tensor> made; // on the device, in the order of the results
    if (!written_arguments(results) && !new_results(results, made)) return false;
    std::vector<Tensor> hosts;
    for (auto& each : made) {
      touch_tensor(each, work_, true);
      accesses_.push_back(access_of(each, true));
      hosts.push_back(host_alias(each));
    }
    torch::jit::Stack arguments(stack_.begin() + begin_, stack_.end());
    auto kernel = [op = op_, arguments, hosts]() mutable {
      const KernelGuard kernels;
      run_kernel(op, arguments);
      size_t next = 0;
      auto keep = [&](const Tensor& result) {
        if (next < hosts.size() && result.defined()) hosts[next++].copy_(result);
      };
      for (auto& result : arguments) {
        if (result.isTensor()) keep(result.toTensor());
        if (!result.isTensorList()) continue;
        for (auto& each : result.toTensorVector()) keep(each);
      }
    };
    stack_.erase(stack_.begin() + begin_, stack_.end());
    stack_.insert(stack_.end(), results.begin(), results.end());
    enqueue(work_, accesses_, std::move(kernel));
    return true;
  }

  // Whether everything that is returned is an argument which the operator writes.
  bool written_arguments(std::vector<IValue>& results) const {
    for (auto& each : op_.schema().returns()) {
      auto* alias = each.alias_info();
      if (alias == nullptr) return false;
      auto same = [&](auto& argument) {
        return argument.alias_info() != nullptr && argument.alias_info()->beforeSets() == alias->beforeSets();
      };
      auto found = std::find_if(arguments_.begin(), arguments_.end(), same);
      if (found == arguments_.end()) return false;
      results.push_back(originals_[found - arguments_.begin()]);
    }
    return true;
  }

  bool new_results(std::vector<IValue>& results, std::vector<Tensor>& made) {
    static auto& unknown = *new std::set<std::string>; // operators without such a kernel
    auto full_name = c10::toString(op_.operator_name());
    results.clear();
    for (auto& each : op_.schema().returns()) {
      auto type = each.type();
      auto is_tensor = type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors());
      if (!is_tensor || each.alias_info() != nullptr) return false;
    }
    if (op_.schema().returns().empty()) return false;
    {
      Lock lock(state_mutex());
      if (unknown.count(full_name) > 0) return false;
    }
    torch::jit::Stack stack;
    for (auto& each : originals_) stack.push_back(to_meta(each));
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } catch (const std::exception&) {
      Lock lock(state_mutex());
      unknown.insert(full_name);
      return false;
    }
    for (auto& each : stack) results.push_back(like_meta(each, made));
    return true;
  }

  IValue to_meta(const IValue& value) const {
    auto convert = [](const Tensor& tensor) -> Tensor {
      if (!tensor.defined() || !tensor.is_cuda()) return tensor;
      return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
    };
    if (value.isTensor()) return convert(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> moved;
      for (auto& each : value.toTensorVector()) moved.push_back(convert(each));
      return moved;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> moved;
      for (auto each : value.toOptionalTensorVector())
        moved.push_back(each ? std::optional<Tensor>(convert(*each)) : std::nullopt);
      return moved;
    }
    if (value.isDevice()) return c10::Device(c10::kMeta);
    return value;
  }

  IValue like_meta(const IValue& value, std::vector<Tensor>& made) const {
    auto convert = [&](const Tensor& meta) -> Tensor {
      if (!meta.defined()) return meta;
      Tensor result = at::detail::empty_strided_generic(
          meta.sizes(), meta.strides(), device_allocator(), kKeys, meta.scalar_type());
      made.push_back(result);
      return result;
    };
    if (value.isTensor()) return convert(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> moved;
    for (auto& each : value.toTensorVector()) moved.push_back(convert(each));
    return moved;
  }

  Tensor to_device(const Tensor& result) {
    if (!result.defined() || !result.is_cpu() || (target_.has_value() && !target_->is_cuda())) return result;
    for (auto& each : passed_) {
      if (!each.host.is_same(result)) continue;
      if (each.is_fresh_output && result.numel() > 0) fill(each.original, result);
      return each.original;
    }
    auto data = result.storage().data();
    for (auto& each : passed_) {
      if (data != nullptr && each.host.storage().data() == data) return device_view(each.original, result);
    }
    Tensor made = at::detail::empty_strided_generic(
        result.sizes(), result.strides(), device_allocator(), kKeys, result.scalar_type());
    if (result.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    touch_tensor(made, work_, true);
    host_alias(made).copy_(result);
    return made;
  }

  void fill(const Tensor& output, const Tensor& result) {
    resize_(output, result.sym_sizes(), std::nullopt);
    touch_tensor(output, work_, true);
    host_alias(output).copy_(result);
  }

  IValue to_device(IValue value) {
    if (value.isTensor()) return to_device(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> moved;
    for (auto& each : value.toTensorVector()) moved.push_back(to_device(each));
    return moved;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const std::vector<c10::Argument>& arguments_;
  size_t begin_;
  c10::Device device_{c10::kCUDA, 0};
  std::optional<c10::Device> target_; // the argument `device`
  at::Generator generator_;
  Work work_{};
  std::vector<Passed> passed_;
  std::vector<IValue> originals_; // the arguments on the device
  std::vector<Access> accesses_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call(op, stack).run();
}

} // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  // As a whole: their composite form would choose kernels that only CUDA has.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

} // namespace fake_cuda

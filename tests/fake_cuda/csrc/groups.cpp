#define USE_DISTRIBUTED
#define USE_C10D
#include "groups.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <deque>
#include <set>
#include <thread>

#include "durations.h"

namespace fake_cuda {
namespace {

constexpr size_t kMostRecorded = 2000;

std::deque<Recorded>& all_recorded() {
  static auto& instance = *new std::deque<Recorded>;
  return instance;
}

bool records() {
  for (auto name : {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}) {
    if (auto text = std::getenv(name)) return std::atoi(text) > 0;
  }
  return true;
}

// What a collective returns: `wait` lets the current stream wait, and not the host.
class StreamWork final : public c10d::Work {
 public:
  StreamWork(
      TaskPtr task, Clock clock, c10::Device device, std::vector<Tensor> outputs, std::vector<Tensor> kept,
      bool holds_host, uint64_t number, c10::intrusive_ptr<c10::ivalue::Future> future, StreamKey stream)
      : task_(std::move(task)), clock_(std::move(clock)), device_(device), outputs_(std::move(outputs)),
        kept_(std::move(kept)), holds_host_(holds_host), number_(number), future_(std::move(future)), stream_(stream) {}
  ~StreamWork() override {
    // Nobody has waited: the memory is reused after the collective.
    for (auto& each : kept_) record_use(each.storage().data(), stream_);
  }
  bool isCompleted() override { return has_ended(clock_); }
  bool isSuccess() const override {
    Lock lock(state_mutex());
    return task_->is_done && task_->error.empty();
  }
  std::exception_ptr exception() const override {
    Lock lock(state_mutex());
    return task_->error.empty() ? nullptr : std::make_exception_ptr(std::runtime_error(task_->error));
  }
  bool wait(std::chrono::milliseconds timeout) override {
    if (holds_host_ || timeout != kNoTimeout || has_failed()) {
      wait_for(task_);
      host_waits(clock_);
    }
    synchronize();
    kept_.clear();
    return true;
  }
  void synchronize() override { stream_waits(current_stream(device_.index()), clock_); }
  void abort() override {}
  std::vector<Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return number_; }

 private:
  bool has_failed() const {
    Lock lock(state_mutex());
    return !task_->error.empty();
  }

  TaskPtr task_;
  Clock clock_;
  c10::Device device_;
  std::vector<Tensor> outputs_, kept_;
  bool holds_host_;
  uint64_t number_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  StreamKey stream_;
};

// The bytes of a tensor in the order of its memory, as NCCL sends them, in a tensor of the host.
Tensor memory_of(const Tensor& alias) {
  if (!alias.is_non_overlapping_and_dense()) return alias.contiguous().flatten();
  return alias.as_strided({alias.numel()}, {1});
}

Tensor to_host(const Operand& operand, const Tensor& alias, const Call& call) {
  if (call.keeps_shapes) return operand.is_read ? alias.clone(at::MemoryFormat::Contiguous) : at::empty_like(alias, at::MemoryFormat::Contiguous);
  auto memory = memory_of(alias);
  if (call.reduces && memory.is_complex()) memory = at::view_as_real(memory);
  return call.reduces ? memory.clone() : memory.clone().view(at::kByte);
}

void keep(const Tensor& alias, const Tensor& value, const Call& call) {
  if (call.keeps_shapes) {
    alias.copy_(value);
    return;
  }
  auto given = call.reduces ? value : value.view(alias.scalar_type());
  if (call.reduces && alias.is_complex()) given = at::view_as_complex(value);
  if (alias.is_non_overlapping_and_dense()) {
    alias.as_strided({alias.numel()}, {1}).copy_(given);
  } else {
    alias.copy_(given.view(alias.sizes()));
  }
}

// A send has ended for the sender when its memory is copied. gloo drops what its caller does not wait for.
void keep_until_received(c10::intrusive_ptr<c10d::Work> sent, std::shared_ptr<std::vector<Tensor>> hosts) {
  std::thread([sent, hosts] {
    try {
      sent->wait();
    } catch (const std::exception&) { // the receiver has ended
    }
  }).detach();
}

int64_t number_of(const std::string& text) {
  return static_cast<int64_t>(std::hash<std::string>{}(text) >> 1);
}

std::string describe(const Call& call) {
  std::string text = call.name + "(";
  for (auto each : call.alike) text += std::to_string(each) + " ";
  return text + ")";
}

// Throws on all ranks if they do not pass alike.
void compare(c10d::Backend& gloo, const Call& call) {
  auto mine = at::zeros({3}, at::kLong);
  int64_t folded = 17;
  for (auto each : call.alike) folded = folded * 1000003 + each;
  mine[0] = number_of(call.name);
  mine[1] = folded;
  mine[2] = static_cast<int64_t>(call.alike.size());
  std::vector<Tensor> rows;
  for (int i = 0; i < gloo.getSize(); ++i) rows.push_back(at::empty({3}, at::kLong));
  std::vector<std::vector<Tensor>> outputs{rows};
  std::vector<Tensor> inputs{mine};
  gloo.allgather(outputs, inputs, c10d::AllgatherOptions())->wait();
  for (int i = 0; i < gloo.getSize(); ++i) {
    if (at::equal(rows[i], mine)) continue;
    auto text = "rank " + std::to_string(gloo.getRank()) + " of a group calls " + describe(call) + ", and rank " +
        std::to_string(i) + " another collective: NCCL would hang, or compute garbage";
    report(text);
    throw MismatchError(text);
  }
}

std::vector<int64_t> alike(const std::vector<Operand>& operands, std::initializer_list<int64_t> others) {
  std::vector<int64_t> found(others);
  for (auto& each : operands) {
    found.push_back(each.tensor.numel());
    found.push_back(static_cast<int64_t>(each.tensor.scalar_type()));
  }
  return found;
}

std::vector<Operand> written(const std::vector<Tensor>& tensors, bool is_read) {
  std::vector<Operand> operands;
  for (auto& each : tensors) operands.push_back({each, is_read, true});
  return operands;
}

std::vector<Operand> joined(std::vector<Operand> operands, const std::vector<Tensor>& read) {
  for (auto& each : read) operands.push_back({each, true, false});
  return operands;
}

int64_t kind(const c10d::ReduceOp& op) {
  return static_cast<int64_t>(op.op_);
}

} // namespace

// A group of gloo on the host that carries the values of one of NCCL; gloo's recorder is not asked about it.
c10::intrusive_ptr<c10d::Backend> carrier(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const c10d::Backend::Options& options) {
  pybind11::gil_scoped_acquire gil;
  auto gloo = pybind11::module_::import("torch._C._distributed_c10d").attr("ProcessGroupGloo");
  auto made = gloo(store, rank, size, pybind11::arg("timeout") = options.timeout);
  made.attr("options").attr("group_name") = "fake-nccl/" + options.group_name;
  return made.cast<c10::intrusive_ptr<c10d::Backend>>();
}

std::vector<Recorded> recorded() {
  Lock lock(state_mutex());
  return {all_recorded().begin(), all_recorded().end()};
}

DeviceGroup::DeviceGroup(
    c10::intrusive_ptr<c10d::Backend> gloo, bool is_nccl, c10::intrusive_ptr<Backend::Options> options)
    : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), is_nccl_(is_nccl),
      options_(std::move(options)), queue_(std::make_shared<Queue>(Queue{!is_nccl})) {}

NcclGroup::NcclGroup(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    const c10::intrusive_ptr<c10d::Backend::Options>& options)
    : DeviceGroup(carrier(store, rank, size, *options), true, options) {}

DeviceGroup::~DeviceGroup() {
  close(*queue_);
}

void DeviceGroup::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  gloo_->setTimeout(timeout);
}

void DeviceGroup::abort() {
  if (is_nccl_) fake_cuda::abort(*queue_, "NCCL communicator was aborted on rank " + std::to_string(getRank()) + ".");
}

void DeviceGroup::shutdown() {
  close(*queue_);
}

c10::intrusive_ptr<c10d::Backend> DeviceGroup::split(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<Backend::Options>& options) {
  auto found = std::find(ranks.begin(), ranks.end(), getRank());
  if (found == ranks.end()) return nullptr;
  auto rank = static_cast<int>(found - ranks.begin());
  return c10::make_intrusive<NcclGroup>(store, rank, static_cast<int>(ranks.size()), options);
}

void DeviceGroup::check(
    const Call& call, const std::vector<Operand>& operands, const c10d::ReduceOp* reduction) const {
  if (!is_nccl_) return;
  static const std::set<at::ScalarType> known{
      at::kChar, at::kByte, at::kInt, at::kLong, at::kUInt64, at::kHalf, at::kFloat, at::kDouble, at::kBFloat16,
      at::kBool, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz};
  for (auto& [tensor, is_read, is_write] : operands) {
    TORCH_CHECK_VALUE(tensor.is_cuda() && !tensor.is_sparse(), "Tensors must be CUDA and dense");
    TORCH_CHECK_VALUE(
        call.is_p2p || tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
    TORCH_CHECK_TYPE(
        tensor.is_complex() || known.count(tensor.scalar_type()) > 0,
        "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
    TORCH_CHECK(
        tensor.device() == operands[0].tensor.device(), "Tensors of a collective must be on one device");
  }
  if (reduction == nullptr) return;
  using Kind = c10d::ReduceOp::RedOpType;
  auto is_bitwise = *reduction == Kind::BAND || *reduction == Kind::BOR || *reduction == Kind::BXOR;
  TORCH_CHECK_VALUE(!is_bitwise, "Cannot use ReduceOp.BAND, BOR or BXOR with NCCL");
}

DeviceGroup::Done DeviceGroup::submit(
    const Call& call, c10::Device device, const std::vector<Operand>& operands, std::vector<Tensor> outputs,
    std::function<void()> body) {
  make_context(device.index());
  auto known = streams_.find(device.index());
  if (known == streams_.end()) {
    auto made = c10::impl::VirtualGuardImpl(c10::kCUDA).getNewStream(device);
    known = streams_.emplace(device.index(), made).first;
  }
  auto stream = stream_key(device.index(), known->second.id());
  stream_waits(stream, record(current_stream(device.index())));
  auto work = launch(stream, "a collective", launch_ms());
  std::vector<Access> accesses;
  std::vector<Tensor> kept;
  for (auto& [tensor, is_read, is_write] : operands) {
    if (tensor.numel() == 0) continue;
    if (is_read) touch_tensor(tensor, work, false);
    if (is_write) touch_tensor(tensor, work, true);
    accesses.push_back(access_of(tensor, is_write));
    kept.push_back(tensor);
  }
  TaskPtr task;
  uint64_t number = 0;
  {
    Lock lock(state_mutex());
    TORCH_CHECK_WITH(
        DistBackendError, !queue_->is_aborted, "NCCL communicator was aborted on rank ", getRank(), ".");
    number = call.is_p2p ? ++p2p_number_ : ++number_;
    task = enqueue(queue_, work, std::move(accesses), std::move(body));
    if (is_nccl_ && records()) {
      auto now = std::chrono::system_clock::now().time_since_epoch();
      Recorded entry{options_->group_name, getGroupDesc(), "nccl:" + call.name, number};
      entry.created_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
      entry.is_p2p = call.is_p2p;
      entry.task = task;
      for (auto& each : operands) {
        if (!each.is_read) continue;
        entry.dtypes.push_back(c10::toString(each.tensor.scalar_type()));
        entry.sizes.push_back(each.tensor.sizes().vec());
      }
      all_recorded().push_back(std::move(entry));
      if (all_recorded().size() > kMostRecorded) all_recorded().pop_front();
    }
  }
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
  {
    const c10::StreamGuard on_stream(known->second);
    future->markCompleted(c10::IValue(outputs));
  }
  auto holds_host = !is_nccl_ || call.name == "all_reduce_barrier";
  return c10::make_intrusive<StreamWork>(
      task, record(stream), device, std::move(outputs), std::move(kept), holds_host, number, future, stream);
}

DeviceGroup::Done DeviceGroup::run(
    Call call, std::vector<Operand> operands, std::vector<Tensor> outputs, Exchange exchange) {
  std::vector<Tensor> aliases;
  for (auto& each : operands) aliases.push_back(host_alias(each.tensor));
  auto device = operands[0].tensor.device();
  for (auto& each : operands) each.tensor = each.tensor.alias(); // the caller may give it other memory
  std::vector<Operand> shapes;
  for (auto& each : operands) shapes.push_back({Tensor(), each.is_read, each.is_write});
  // Starts the exchange; what it returns waits for its end.
  auto start = [gloo = gloo_, is_nccl = is_nccl_, call, shapes, aliases, exchange]() -> std::function<void()> {
    const KernelGuard kernels;
    if (is_nccl && !call.is_p2p) compare(*gloo, call);
    auto hosts = std::make_shared<std::vector<Tensor>>();
    for (size_t i = 0; i < aliases.size(); ++i) hosts->push_back(to_host(shapes[i], aliases[i], call));
    auto done = exchange(*hosts);
    return [call, shapes, aliases, hosts, done] {
      const KernelGuard kernels;
      auto is_sent = call.is_p2p && !shapes[0].is_write;
      if (is_sent) {
        keep_until_received(done, hosts);
      } else if (done) {
        done->wait();
      }
      for (size_t i = 0; i < aliases.size(); ++i) {
        if (shapes[i].is_write) keep(aliases[i], (*hosts)[i], call);
      }
    };
  };
  if (is_coalescing_ && call.is_p2p) {
    coalesced_bodies_.push_back(start);
    coalesced_operands_.insert(coalesced_operands_.end(), operands.begin(), operands.end());
    return nullptr;
  }
  auto work = submit(call, device, operands, std::move(outputs), [start] { start()(); });
  if (is_coalescing_) coalesced_.push_back(work);
  return work;
}

void DeviceGroup::startCoalescing() {
  is_coalescing_ = true;
  coalesced_.clear();
  coalesced_bodies_.clear();
  coalesced_operands_.clear();
}

DeviceGroup::Done DeviceGroup::endCoalescing() {
  is_coalescing_ = false;
  if (coalesced_bodies_.empty()) return coalesced_.empty() ? nullptr : coalesced_.back(); // of one stream, in order
  Call call{"coalesced", {}, true};
  auto body = [bodies = coalesced_bodies_] {
    std::vector<std::function<void()>> ends;
    for (auto& start : bodies) ends.push_back(start());
    for (auto& end : ends) end();
  };
  auto device = coalesced_operands_[0].tensor.device();
  return submit(call, device, coalesced_operands_, {}, body);
}

DeviceGroup::Done DeviceGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto operands = written(tensors, true);
  Call call{"broadcast", alike(operands, {options.rootRank})};
  check(call, operands, nullptr);
  return run(call, operands, tensors, [gloo = gloo_, options](auto& hosts) { return gloo->broadcast(hosts, options); });
}

DeviceGroup::Done DeviceGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto operands = written(tensors, true);
  Call call{"all_reduce", alike(operands, {kind(options.reduceOp)})};
  call.reduces = true;
  check(call, operands, &options.reduceOp);
  return run(call, operands, tensors, [gloo = gloo_, options](auto& hosts) { return gloo->allreduce(hosts, options); });
}

DeviceGroup::Done DeviceGroup::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto operands = written(tensors, true);
  Call call{"allreduce_coalesced", alike(operands, {kind(options.reduceOp)})};
  call.reduces = true;
  check(call, operands, &options.reduceOp);
  return run(call, operands, tensors, [gloo = gloo_, options](auto& hosts) {
    for (auto& each : hosts) {
      std::vector<Tensor> one{each};
      gloo->allreduce(one, options)->wait();
    }
    return Done();
  });
}

DeviceGroup::Done DeviceGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  std::vector<Operand> operands{{tensors[0], true, options.rootRank == getRank()}};
  Call call{"reduce", alike(operands, {kind(options.reduceOp), options.rootRank})};
  call.reduces = true;
  check(call, operands, &options.reduceOp);
  return run(call, operands, tensors, [gloo = gloo_, options](auto& hosts) { return gloo->reduce(hosts, options); });
}

DeviceGroup::Done DeviceGroup::allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  auto operands = joined(written(outputs[0], false), inputs);
  Call call{"all_gather", alike(operands, {})};
  check(call, operands, nullptr);
  return run(call, operands, outputs[0], [gloo = gloo_, options](auto& hosts) {
    Lists to{{hosts.begin(), hosts.end() - 1}};
    Tensors from{hosts.back()};
    // Lists of other sizes on each rank are broadcasts, as in ProcessGroupNCCL.
    auto is_even = std::all_of(hosts.begin(), hosts.end(), [&](auto& each) { return each.numel() == from[0].numel(); });
    if (is_even) return gloo->allgather(to, from, options);
    for (int i = 0; i < gloo->getSize(); ++i) {
      c10d::BroadcastOptions root;
      root.rootRank = i;
      if (i == gloo->getRank()) to[0][i].copy_(from[0]);
      std::vector<Tensor> one{to[0][i]};
      gloo->broadcast(one, root)->wait();
    }
    return Done();
  });
}

DeviceGroup::Done DeviceGroup::_allgather_base(
    Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  std::vector<Operand> operands{{output, false, true}, {input, true, false}};
  Call call{"_all_gather_base", alike(operands, {})};
  check(call, operands, nullptr);
  TORCH_CHECK_VALUE(
      output.numel() == input.numel() * getSize(), "output tensor size must be equal to world_size times input tensor size");
  return run(call, operands, {output}, [gloo = gloo_, options](auto& hosts) {
    return gloo->_allgather_base(hosts[0], hosts[1], options);
  });
}

DeviceGroup::Done DeviceGroup::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  auto operands = joined(written(outputs, false), inputs);
  Call call{"all_gather_into_tensor_coalesced", alike(operands, {})};
  check(call, operands, nullptr);
  return run(call, operands, outputs, [gloo = gloo_, options, count = outputs.size()](auto& hosts) {
    for (size_t i = 0; i < count; ++i) gloo->_allgather_base(hosts[i], hosts[count + i], options)->wait();
    return Done();
  });
}

DeviceGroup::Done DeviceGroup::gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  auto is_root = options.rootRank == getRank();
  auto results = is_root ? outputs[0] : Tensors{};
  auto operands = joined(written(results, false), inputs);
  Call call{"gather", {inputs[0].numel(), static_cast<int64_t>(inputs[0].scalar_type()), options.rootRank}};
  check(call, operands, nullptr);
  return run(call, operands, results, [gloo = gloo_, options, is_root](auto& hosts) {
    Lists to;
    if (is_root) to.push_back({hosts.begin(), hosts.end() - 1});
    Tensors from{hosts.back()};
    return gloo->gather(to, from, options);
  });
}

DeviceGroup::Done DeviceGroup::scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) {
  auto is_root = options.rootRank == getRank();
  auto operands = joined(written(outputs, false), is_root ? inputs[0] : Tensors{});
  Call call{"scatter", {outputs[0].numel(), static_cast<int64_t>(outputs[0].scalar_type()), options.rootRank}};
  check(call, operands, nullptr);
  return run(call, operands, outputs, [gloo = gloo_, options, is_root](auto& hosts) {
    Tensors to{hosts[0]};
    Lists from;
    if (is_root) from.push_back({hosts.begin() + 1, hosts.end()});
    return gloo->scatter(to, from, options);
  });
}

DeviceGroup::Done DeviceGroup::reduce_scatter(
    Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) {
  auto operands = joined(written(outputs, false), inputs[0]);
  Call call{"reduce_scatter", alike(operands, {kind(options.reduceOp)})};
  call.reduces = true;
  check(call, operands, &options.reduceOp);
  return run(call, operands, outputs, [gloo = gloo_, options](auto& hosts) {
    Tensors to{hosts[0]};
    Lists from{{hosts.begin() + 1, hosts.end()}};
    return gloo->reduce_scatter(to, from, options);
  });
}

DeviceGroup::Done DeviceGroup::_reduce_scatter_base(
    Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  std::vector<Operand> operands{{output, false, true}, {input, true, false}};
  Call call{"_reduce_scatter_base", alike(operands, {kind(options.reduceOp)})};
  call.reduces = true;
  check(call, operands, &options.reduceOp);
  TORCH_CHECK_VALUE(
      input.numel() == output.numel() * getSize(), "input tensor must be the same size as output size times world size");
  return run(call, operands, {output}, [gloo = gloo_, options](auto& hosts) {
    return gloo->_reduce_scatter_base(hosts[0], hosts[1], options);
  });
}

DeviceGroup::Done DeviceGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  auto operands = joined(written(outputs, false), inputs);
  Call call{"reduce_scatter_tensor_coalesced", alike(operands, {kind(options.reduceOp)})};
  call.reduces = true;
  check(call, operands, &options.reduceOp);
  return run(call, operands, outputs, [gloo = gloo_, options, count = outputs.size()](auto& hosts) {
    for (size_t i = 0; i < count; ++i) gloo->_reduce_scatter_base(hosts[i], hosts[count + i], options)->wait();
    return Done();
  });
}

DeviceGroup::Done DeviceGroup::alltoall_base(
    Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  std::vector<Operand> operands{{output, false, true}, {input, true, false}};
  Call call{"all_to_all", {static_cast<int64_t>(input.scalar_type())}};
  call.keeps_shapes = true;
  check(call, operands, nullptr);
  return run(call, operands, {output}, [gloo = gloo_, options, output_sizes, input_sizes](auto& hosts) mutable {
    return gloo->alltoall_base(hosts[0], hosts[1], output_sizes, input_sizes, options);
  });
}

DeviceGroup::Done DeviceGroup::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  auto operands = joined(written(outputs, false), inputs);
  Call call{"all_to_all", {static_cast<int64_t>(inputs[0].scalar_type())}};
  check(call, operands, nullptr);
  return run(call, operands, outputs, [gloo = gloo_, options, count = outputs.size()](auto& hosts) {
    Tensors to{hosts.begin(), hosts.begin() + count}, from{hosts.begin() + count, hosts.end()};
    return gloo->alltoall(to, from, options);
  });
}

DeviceGroup::Done DeviceGroup::send(Tensors& tensors, int to, int tag) {
  std::vector<Operand> operands{{tensors[0], true, false}};
  Call call{"send " + std::to_string(getRank()) + "->" + std::to_string(to), {}, true};
  check(call, operands, nullptr);
  return run(call, operands, {}, [gloo = gloo_, to, tag](auto& hosts) { return gloo->send(hosts, to, tag); });
}

DeviceGroup::Done DeviceGroup::recv(Tensors& tensors, int from, int tag) {
  std::vector<Operand> operands{{tensors[0], false, true}};
  Call call{"recv " + std::to_string(getRank()) + "<-" + std::to_string(from), {}, true};
  check(call, operands, nullptr);
  return run(call, operands, tensors, [gloo = gloo_, from, tag](auto& hosts) { return gloo->recv(hosts, from, tag); });
}

DeviceGroup::Done DeviceGroup::barrier(const c10d::BarrierOptions& options) {
  auto device = options.device.value_or(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(current_device())));
  Call call{"all_reduce_barrier", {}};
  auto body = [gloo = gloo_, call] { compare(*gloo, call); };
  return submit(call, device, {}, {}, body);
}

} // namespace fake_cuda

// Process groups of device tensors: NCCL's, as strict as NCCL and stricter, and gloo's. Both exchange values over gloo.
#pragma once
#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "pending.h"
#include "tensors.h"

namespace fake_cuda {

// A tensor of a collective.
struct Operand {
  Tensor tensor;
  bool is_read, is_write;
};

// What all ranks must pass alike. NCCL compares nothing: it would compute garbage, or hang.
struct Call {
  std::string name;            // as NCCL's recorder has it: "all_reduce"
  std::vector<int64_t> alike;  // sizes, dtype, root, reduction
  bool is_p2p = false;
  bool keeps_shapes = false;   // the exchange needs the tensors' sizes, not only their bytes
  bool reduces = false;
};

using Exchange = std::function<c10::intrusive_ptr<c10d::Work>(std::vector<Tensor>& on_host)>;

// One collective in the recorder's trace.
struct Recorded {
  std::string group, description, name;
  uint64_t number;
  std::vector<std::string> dtypes;
  std::vector<std::vector<int64_t>> sizes;
  int64_t created_ns;
  bool is_p2p;
  TaskPtr task;
};
std::vector<Recorded> recorded();

class DeviceGroup : public c10d::Backend {
 public:
  // gloo: carries the values. is_nccl: refuses what NCCL refuses, and does not hold the host.
  DeviceGroup(c10::intrusive_ptr<c10d::Backend> gloo, bool is_nccl, c10::intrusive_ptr<Backend::Options> options);
  ~DeviceGroup() override;

  const std::string getBackendName() const override { return is_nccl_ ? "nccl" : "gloo"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return is_nccl_; }
  bool supportsCoalescing() const override { return is_nccl_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Backend::Options>& options) override;
  void abort() override;
  void shutdown() override;
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  using Tensors = std::vector<Tensor>;
  using Lists = std::vector<std::vector<Tensor>>;
  using Done = c10::intrusive_ptr<c10d::Work>;
  Done broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Done allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Done allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Done reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Done allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Done _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override;
  Done allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Done gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Done scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override;
  Done reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override;
  Done _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override;
  Done reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  Done alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override;
  Done alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Done send(Tensors& tensors, int to, int tag) override;
  Done recv(Tensors& tensors, int from, int tag) override;
  Done barrier(const c10d::BarrierOptions& options) override;

 private:
  Done run(Call call, std::vector<Operand> operands, std::vector<Tensor> outputs, Exchange exchange);
  Done submit(
      const Call& call, c10::Device device, const std::vector<Operand>& operands, std::vector<Tensor> outputs,
      std::function<void()> body);
  void check(const Call& call, const std::vector<Operand>& operands, const c10d::ReduceOp* reduction) const;

  c10::intrusive_ptr<c10d::Backend> gloo_;
  bool is_nccl_;
  c10::intrusive_ptr<Backend::Options> options_;
  std::shared_ptr<Queue> queue_;
  std::map<int, c10::Stream> streams_; // one of each device
  uint64_t number_ = 0, p2p_number_ = 0;
  bool is_coalescing_ = false;
  std::vector<Done> coalesced_;
  std::vector<std::function<std::function<void()>()>> coalesced_bodies_;
  std::vector<Operand> coalesced_operands_;
};

// ProcessGroupNCCL and its options.
class NcclGroup final : public DeviceGroup {
 public:
  struct Options : c10d::Backend::Options {
    explicit Options(bool is_high_priority_stream = false)
        : c10d::Backend::Options("nccl"), is_high_priority_stream(is_high_priority_stream) {}
    Options(const Options&) = default;
    bool is_high_priority_stream;
    c10::intrusive_ptr<c10d::Backend> split_from;
    int64_t split_color = 0;
  };
  NcclGroup(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
      const c10::intrusive_ptr<c10d::Backend::Options>& options);
};

} // namespace fake_cuda

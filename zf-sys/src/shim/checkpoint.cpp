// A node of the autograd graph that keeps a function's inputs instead of its intermediate results, and runs the
// function again in backward.

#include "shim.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <mutex>

namespace {

using torch::autograd::edge_list;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

} // namespace

// What Rust supplies. `run` and `stash` borrow their inputs; `run` and `fetch` append to the list.
struct ZfCheckpointCalls {
  ZfMessage (*run)(void*, const ZfTensor* inputs, size_t count, ZfList* outputs);
  ZfMessage (*stash)(void*, const ZfTensor* inputs, size_t count); // null: keep the inputs themselves
  ZfMessage (*fetch)(void*, ZfList* inputs);
  ZfMessage (*begin)(void*); // before the inputs are fetched in backward; may be null
  ZfMessage (*end)(void*); // after the block's backward; may be null
  void (*release)(void*); // the stash is no longer needed
  void (*drop)(void*);
};

namespace {

variable_list run(const ZfCheckpointCalls& calls, void* value, variable_list& inputs) {
  std::vector<ZfTensor> pointers;
  pointers.reserve(inputs.size());
  for (at::Tensor& input : inputs) {
    pointers.push_back(&input);
  }
  ZfList outputs;
  zf::raise_if(calls.run(value, pointers.data(), pointers.size(), &outputs));
  return std::move(outputs.items);
}

struct CheckpointNode final : torch::autograd::Node {
  CheckpointNode(edge_list&& edges, std::shared_ptr<zf::Owned> value, const ZfCheckpointCalls& functions)
      : Node(std::move(edges)), closure(std::move(value)), calls(functions) {}

  std::string name() const override {
    return "ZenFlowCheckpoint";
  }

  void save(variable_list& inputs) {
    for (const at::Tensor& input : inputs) {
      needs_grad.push_back(input.defined() && input.requires_grad());
    }
    if (calls.stash == nullptr) {
      for (const at::Tensor& input : inputs) {
        saved.emplace_back(input, /*is_output=*/false);
      }
      return;
    }
    std::vector<ZfTensor> pointers;
    for (at::Tensor& input : inputs) {
      pointers.push_back(&input);
    }
    zf::raise_if(calls.stash(closure->get(), pointers.data(), pointers.size()));
  }

  variable_list apply(variable_list&& output_grads) override {
    // A node may be reached by two backward passes over the same graph in different threads.
    const std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    if (calls.begin != nullptr) {
      zf::raise_if(calls.begin(closure->get()));
    }
    variable_list input_grads = recompute(std::move(output_grads));
    if (calls.end != nullptr) {
      zf::raise_if(calls.end(closure->get()));
    }
    return input_grads;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    released = true;
    saved.clear();
    calls.release(closure->get());
  }

  std::shared_ptr<zf::Owned> closure;
  const ZfCheckpointCalls calls;
  std::vector<SavedVariable> saved;
  std::vector<bool> needs_grad;
  std::vector<size_t> differentiable; // positions of the outputs that have a gradient
  size_t output_count = 0;
  bool released = false;

 private:
  variable_list fetch() {
    variable_list inputs;
    if (calls.stash == nullptr) {
      for (const SavedVariable& variable : saved) {
        inputs.push_back(variable.unpack());
      }
      return inputs;
    }
    ZfList list;
    zf::raise_if(calls.fetch(closure->get(), &list));
    TORCH_CHECK(
        list.items.size() == needs_grad.size(),
        "the stash of a checkpointed block gave back ",
        list.items.size(),
        " inputs, but ",
        needs_grad.size(),
        " were stashed");
    return std::move(list.items);
  }

  variable_list recompute(variable_list&& output_grads) {
    variable_list inputs = fetch();
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].defined()) {
        inputs[i] = inputs[i].detach();
        inputs[i].set_requires_grad(needs_grad[i] && task_should_compute_output(i));
      }
    }
    variable_list outputs;
    {
      const at::AutoGradMode grad(true);
      outputs = run(calls, closure->get(), inputs);
    }
    TORCH_CHECK(
        outputs.size() == output_count,
        "a checkpointed block returned ",
        output_count,
        " tensors in forward but ",
        outputs.size(),
        " when it was run again");
    variable_list roots;
    variable_list root_grads;
    for (size_t i = 0; i < differentiable.size(); ++i) {
      const at::Tensor& output = outputs[differentiable[i]];
      if (output_grads[i].defined() && output.defined() && output.requires_grad()) {
        roots.push_back(output);
        root_grads.push_back(std::move(output_grads[i]));
      }
    }
    outputs.clear();
    if (!roots.empty()) {
      torch::autograd::backward(roots, root_grads);
    }
    variable_list input_grads(num_outputs()); // the last one, the anchor's, stays undefined
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].defined() && inputs[i].requires_grad()) {
        input_grads[i] = inputs[i].grad();
      }
    }
    return input_grads;
  }
};

} // namespace

// Takes ownership of `value` in every case. A null or undefined input stands for a missing tensor.
extern "C" ZfMessage zf_checkpoint(
    const ZfTensor* inputs,
    size_t count,
    ZfTensor anchor,
    void* value,
    const ZfCheckpointCalls* calls,
    ZfList* out) noexcept {
  return zf::guarded([&] {
    auto closure = std::make_shared<zf::Owned>(value, calls->drop);
    variable_list variables;
    for (size_t i = 0; i < count; ++i) {
      variables.push_back(*inputs[i]);
    }
    bool records = anchor->defined() && anchor->requires_grad();
    for (const at::Tensor& variable : variables) {
      records = records || (variable.defined() && variable.requires_grad());
    }
    records = records && at::GradMode::is_enabled();
    if (!records) {
      out->items = run(*calls, closure->get(), variables);
      return;
    }

    // An edge for every input, present or not, so that positions agree; the anchor's edge comes last.
    edge_list edges;
    for (const at::Tensor& variable : variables) {
      edges.push_back(variable.defined() ? torch::autograd::impl::gradient_edge(variable) : torch::autograd::Edge());
    }
    edges.push_back(anchor->defined() ? torch::autograd::impl::gradient_edge(*anchor) : torch::autograd::Edge());
    std::shared_ptr<CheckpointNode> node(
        new CheckpointNode(std::move(edges), closure, *calls), torch::autograd::deleteNode);
    // Saved first: the version counters then also catch a function that changes its inputs in place.
    node->save(variables);

    variable_list outputs;
    {
      const at::NoGradGuard no_grad;
      outputs = run(*calls, closure->get(), variables);
    }
    node->output_count = outputs.size();
    for (size_t i = 0; i < outputs.size(); ++i) {
      at::Tensor output = outputs[i];
      TORCH_CHECK(output.defined(), "output ", i, " of a checkpointed block is an undefined tensor");
      // Detached, since a function may return one of its inputs, which has a history of its own.
      output = output.detach();
      if (torch::autograd::isDifferentiableType(output.scalar_type())) {
        torch::autograd::set_history(output, node);
        node->differentiable.push_back(i);
      }
      out->items.push_back(std::move(output));
    }
  });
}

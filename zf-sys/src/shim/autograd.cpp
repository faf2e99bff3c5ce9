// Backward passes, gradients and hooks.

#include "shim.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

namespace {

using Callback = ZfMessage (*)(void*);

// Calls a Rust closure when a leaf's gradient is complete.
struct AccumulatedHook final : torch::autograd::PostAccumulateGradHook {
  AccumulatedHook(void* value, Callback call, zf::Owned::Drop drop) : closure(value, drop), callback(call) {}

  void operator()(const at::Tensor&) override {
    zf::raise_if(callback(closure.get()));
  }

  zf::Owned closure;
  Callback callback;
};

} // namespace

extern "C" {

// `grads` is null or holds one entry a root; a null entry stands for an undefined gradient (ones, for a scalar root).
ZfMessage zf_backward(const ZfTensor* roots, const ZfTensor* grads, size_t count, bool retain) noexcept {
  return zf::guarded([&] {
    torch::autograd::variable_list tensors;
    torch::autograd::variable_list gradients;
    for (size_t i = 0; i < count; ++i) {
      tensors.push_back(*roots[i]);
      gradients.push_back(grads[i] == nullptr ? at::Tensor() : *grads[i]);
    }
    torch::autograd::backward(tensors, gradients, retain, /*create_graph=*/false);
  });
}

ZfMessage zf_set_grad(ZfTensor param, ZfTensor grad) noexcept {
  return zf::guarded([&] {
    TORCH_CHECK(param->defined(), "the parameter is an undefined tensor");
    TORCH_CHECK(param->is_leaf(), "only a leaf tensor holds a gradient; this one is the result of an operation");
    if (grad == nullptr || !grad->defined()) {
      param->mutable_grad().reset();
      param->set_grad_dtype(param->scalar_type());
      return;
    }
    TORCH_CHECK(
        grad->sizes() == param->sizes(),
        "the gradient's shape ",
        grad->sizes(),
        " differs from the parameter's shape ",
        param->sizes());
    TORCH_CHECK(
        grad->device() == param->device(),
        "the gradient is on ",
        grad->device(),
        " but the parameter on ",
        param->device());
    param->mutable_grad().reset();
    // With this dtype the engine casts each incoming gradient to it before anything is summed, so that a parameter used
    // several times also accumulates in the wider type.
    param->set_grad_dtype(grad->scalar_type());
    param->mutable_grad() = *grad;
  });
}

ZfMessage zf_grad(ZfTensor param, ZfTensor* out) noexcept {
  return zf::guarded([&] {
    const at::Tensor& grad = param->grad();
    *out = grad.defined() ? new at::Tensor(grad) : nullptr;
  });
}

// Takes ownership of `value` in every case.
ZfMessage zf_hook_accumulated(ZfTensor param, void* value, Callback call, zf::Owned::Drop drop) noexcept {
  std::unique_ptr<torch::autograd::PostAccumulateGradHook> hook;
  return zf::guarded([&] {
    hook = std::make_unique<AccumulatedHook>(value, call, drop);
    TORCH_CHECK(param->defined() && param->is_leaf(), "a hook on the accumulated gradient needs a leaf tensor");
    TORCH_CHECK(param->requires_grad(), "the parameter does not require a gradient, so the hook would never run");
    torch::autograd::impl::set_post_acc_grad_hooks(*param, std::move(hook));
  });
}

ZfMessage zf_hook_clear(ZfTensor param) noexcept {
  return zf::guarded([&] {
    TORCH_CHECK(param->defined(), "the parameter is an undefined tensor");
    if (torch::autograd::impl::post_acc_grad_hooks(*param) != nullptr) {
      torch::autograd::impl::set_post_acc_grad_hooks(*param, nullptr);
    }
  });
}

// Takes ownership of `value` in every case.
ZfMessage zf_hook_output(ZfTensor output, void* value, Callback call, zf::Owned::Drop drop) noexcept {
  return zf::guarded([&] {
    auto closure = std::make_shared<zf::Owned>(value, drop);
    TORCH_CHECK(
        output->defined() && output->requires_grad(),
        "the tensor does not require a gradient, so the hook would never run");
    output->register_hook([closure, call](const at::Tensor&) -> void { zf::raise_if(call(closure->get())); });
  });
}

ZfMessage zf_variable_data(ZfTensor source, ZfTensor* out) noexcept {
  return zf::guarded([&] { *out = new at::Tensor(source->variable_data()); });
}

ZfMessage zf_version(ZfTensor source, uint64_t* out) noexcept {
  return zf::guarded([&] { *out = static_cast<uint64_t>(source->_version()); });
}

} // extern "C"

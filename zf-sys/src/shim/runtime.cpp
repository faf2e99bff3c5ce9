// Messages and tensor lists, random state, fused AdamW, threads and devices.

#include "shim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/headeronly/version.h>

#include <cstdlib>
#include <cstring>
#include <string>

namespace {

char out_of_memory[] = "an error occurred, and no memory was left to describe it";

std::vector<at::Tensor> gather(const ZfTensor* tensors, size_t count) {
  std::vector<at::Tensor> list;
  list.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    list.push_back(*tensors[i]);
  }
  return list;
}

} // namespace

extern "C" {

ZfMessage zf_message_new(const char* text, size_t length) noexcept {
  auto* copy = static_cast<char*>(std::malloc(length + 1));
  if (copy == nullptr) {
    return out_of_memory;
  }
  std::memcpy(copy, text, length);
  copy[length] = '\0';
  return copy;
}

void zf_message_free(ZfMessage message) noexcept {
  if (message != out_of_memory) {
    std::free(message);
  }
}

} // extern "C"

ZfMessage zf::message(const char* text) noexcept {
  return zf_message_new(text, std::strlen(text));
}

void zf::raise_if(ZfMessage message) {
  if (message == nullptr) {
    return;
  }
  const std::unique_ptr<char, void (*)(ZfMessage)> owned(message, [](ZfMessage text) { zf_message_free(text); });
  throw std::runtime_error(owned.get());
}

extern "C" {

ZfMessage zf_list_new(ZfList** out) noexcept {
  return zf::guarded([&] { *out = new ZfList(); });
}

void zf_list_free(ZfList* list) noexcept {
  delete list;
}

size_t zf_list_length(const ZfList* list) noexcept {
  return list->items.size();
}

ZfMessage zf_list_push(ZfList* list, ZfTensor tensor) noexcept {
  return zf::guarded([&] { list->items.push_back(*tensor); });
}

// A new handle of the tensor at `index`, which must be below the length.
ZfMessage zf_list_get(const ZfList* list, size_t index, ZfTensor* out) noexcept {
  return zf::guarded([&] { *out = new at::Tensor(list->items.at(index)); });
}

ZfMessage zf_tensor_clone(ZfTensor tensor, ZfTensor* out) noexcept {
  return zf::guarded([&] { *out = new at::Tensor(*tensor); });
}

ZfMessage zf_rng_state(ZfTensor* out) noexcept {
  return zf::guarded([&] {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    *out = new at::Tensor(generator.get_state());
  });
}

ZfMessage zf_rng_set_state(const void* bytes, size_t length) noexcept {
  return zf::guarded([&] {
    at::Tensor state = at::empty({static_cast<int64_t>(length)}, at::dtype(at::kByte));
    std::memcpy(state.mutable_data_ptr(), bytes, length);
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  });
}

ZfMessage zf_fused_adamw(
    const ZfTensor* params,
    const ZfTensor* grads,
    const ZfTensor* exp_avgs,
    const ZfTensor* exp_avg_sqs,
    const ZfTensor* steps,
    size_t count,
    double lr,
    double beta1,
    double beta2,
    double weight_decay,
    double eps) noexcept {
  return zf::guarded([&] {
    at::_fused_adamw_(
        gather(params, count),
        gather(grads, count),
        gather(exp_avgs, count),
        gather(exp_avg_sqs, count),
        /*max_exp_avg_sqs=*/{},
        gather(steps, count),
        lr,
        beta1,
        beta2,
        weight_decay,
        eps,
        /*amsgrad=*/false,
        /*maximize=*/false);
  });
}

ZfMessage zf_set_threads(int count) noexcept {
  return zf::guarded([&] {
    // libtorch initialises a thread's count on its first use there, from the number that any thread set last. Asking
    // first gets that over with; otherwise the first operator would overwrite what is set here.
    at::get_num_threads();
    at::set_num_threads(count);
  });
}

ZfMessage zf_threads(int* out) noexcept {
  return zf::guarded([&] { *out = at::get_num_threads(); });
}

// `index` below 0 is the CPU, on which nothing runs behind the caller's back.
ZfMessage zf_synchronize(int index) noexcept {
  return zf::guarded([&] {
    if (index < 0) {
      return;
    }
    TORCH_CHECK(c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA), "this libtorch is built without CUDA");
    const c10::impl::VirtualGuardImpl device(c10::DeviceType::CUDA);
    TORCH_CHECK(
        index < device.deviceCount(), "there is no CUDA device ", index, "; the count is ", int(device.deviceCount()));
    device.synchronizeDevice(static_cast<c10::DeviceIndex>(index));
  });
}

ZfMessage zf_cuda_devices(bool* built, int* count) noexcept {
  return zf::guarded([&] {
    *built = c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA);
    *count = *built ? c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount() : 0;
  });
}

const char* zf_libtorch_version() noexcept {
  return TORCH_VERSION;
}

ZfMessage zf_cpu_capability(ZfMessage* out) noexcept {
  return zf::guarded([&] { *out = zf::message(at::get_cpu_capability().c_str()); });
}

} // extern "C"

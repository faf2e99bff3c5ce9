// Storage that is released and refilled under living views, and plain access to CPU tensors.

#include "shim.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <string>

struct ZfView {
  void* data;
  int64_t count;
  int64_t storage_bytes;
  int64_t needed_bytes; // up to the last element of this view
  int32_t scalar_type;
  bool cpu;
  bool contiguous;
};

extern "C" {

ZfMessage zf_storage_resize(ZfTensor tensor, size_t bytes) noexcept {
  return zf::guarded([&] {
    TORCH_CHECK(tensor->defined() && tensor->has_storage(), "the tensor has no storage");
    c10::StorageImpl* storage = tensor->storage().unsafeGetStorageImpl();
    const size_t before = storage->nbytes();
    if (before == bytes) {
      return;
    }
    const c10::Device device = storage->device();
    c10::Allocator* allocator =
        device.is_cpu() ? c10::GetCPUAllocator() : c10::GetAllocator(device.type());
    if (allocator == nullptr) {
      allocator = storage->allocator();
    }
    TORCH_CHECK(
        storage->resizable() && allocator != nullptr,
        "the storage cannot be resized: it belongs to memory from outside libtorch");
    const c10::OptionalDeviceGuard guard(device);
    if (bytes == 0) {
      // An empty allocation still names the device, so that views keep theirs.
      storage->set_data_ptr_noswap(c10::DataPtr(nullptr, device));
      storage->set_nbytes(0);
      return;
    }
    c10::DataPtr fresh = allocator->allocate(bytes);
    const size_t kept = std::min(before, bytes);
    if (kept > 0) {
      allocator->copy_data(fresh.get(), storage->data(), kept);
    }
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(bytes);
  });
}

ZfMessage zf_storage_bytes(ZfTensor tensor, size_t* out) noexcept {
  return zf::guarded([&] {
    TORCH_CHECK(tensor->defined() && tensor->has_storage(), "the tensor has no storage");
    *out = tensor->storage().nbytes();
  });
}

ZfMessage zf_view(ZfTensor tensor, ZfView* out) noexcept {
  return zf::guarded([&] {
    TORCH_CHECK(tensor->defined(), "the tensor is undefined");
    TORCH_CHECK(tensor->layout() == at::kStrided && tensor->has_storage(), "the tensor is not a dense one");
    out->count = tensor->numel();
    out->scalar_type = static_cast<int32_t>(tensor->scalar_type());
    out->cpu = tensor->device().is_cpu();
    out->contiguous = tensor->is_contiguous();
    out->storage_bytes = static_cast<int64_t>(tensor->storage().nbytes());
    out->needed_bytes = (tensor->storage_offset() + out->count) * static_cast<int64_t>(tensor->itemsize());
    // Not asked of a released storage, for which libtorch refuses.
    const bool readable = out->cpu && out->count > 0 && out->needed_bytes <= out->storage_bytes;
    out->data = readable ? tensor->mutable_data_ptr() : nullptr;
  });
}

ZfMessage zf_scalar_name(int32_t scalar_type, ZfMessage* out) noexcept {
  return zf::guarded([&] { *out = zf::message(c10::toString(static_cast<c10::ScalarType>(scalar_type))); });
}

ZfMessage zf_tensor_from(
    const void* data,
    size_t bytes,
    const int64_t* shape,
    size_t dimensions,
    int32_t scalar_type,
    ZfTensor* out) noexcept {
  return zf::guarded([&] {
    at::Tensor tensor =
        at::empty(c10::IntArrayRef(shape, dimensions), at::dtype(static_cast<c10::ScalarType>(scalar_type)));
    TORCH_CHECK(tensor.nbytes() == bytes, "the shape wants ", tensor.nbytes(), " bytes but ", bytes, " were given");
    if (bytes > 0) {
      std::memcpy(tensor.mutable_data_ptr(), data, bytes);
    }
    *out = new at::Tensor(std::move(tensor));
  });
}

} // extern "C"

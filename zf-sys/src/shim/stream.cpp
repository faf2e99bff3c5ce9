// Copies on side streams, events, pinned memory. Written against the interface that all devices implement, so that it
// compiles without CUDA's headers; without a CUDA build of libtorch only the CPU's form works.

#include "shim.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <memory>
#include <optional>

// A stream of a CUDA device; on the CPU there is none, and everything happens at once.
struct ZfStream {
  std::optional<c10::Stream> stream;
};

// The moments around a copy.
struct ZfCopy {
  std::optional<c10::Event> begin;
  std::optional<c10::Event> end;
};

namespace {

// Neither recorded by autograd nor seen by its version counters: whoever asks for a copy says when it may be read.
void copy(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView quiet;
  to.copy_(from, non_blocking);
}

} // namespace

extern "C" {

// `index` below 0 is the CPU.
ZfMessage zf_stream_new(int index, ZfStream** out) noexcept {
  return zf::guarded([&] {
    auto made = std::make_unique<ZfStream>();
    if (index >= 0) {
      TORCH_CHECK(c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA), "this libtorch is built without CUDA");
      const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
      TORCH_CHECK(
          index < guard.deviceCount(), "there is no CUDA device ", index, "; the count is ", int(guard.deviceCount()));
      const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
      made->stream = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    }
    *out = made.release();
  });
}

void zf_stream_free(ZfStream* stream) noexcept {
  delete stream;
}

// Copies after all that the calling thread's current stream was given before, beside what it is given after.
ZfMessage zf_stream_copy(ZfStream* side, ZfTensor to, ZfTensor from, ZfCopy** out) noexcept {
  return zf::guarded([&] {
    auto made = std::make_unique<ZfCopy>();
    if (!side->stream.has_value()) {
      copy(*to, *from, false);
    } else {
      const c10::Stream stream = *side->stream;
      const c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
      c10::Event before(c10::DeviceType::CUDA);
      before.record(guard.getStream(stream.device()));
      before.block(stream);
      made->begin.emplace(c10::DeviceType::CUDA, c10::EventFlag::BACKEND_DEFAULT);
      made->end.emplace(c10::DeviceType::CUDA, c10::EventFlag::BACKEND_DEFAULT);
      const c10::StreamGuard on(stream);
      made->begin->record(stream);
      copy(*to, *from, true);
      made->end->record(stream);
    }
    *out = made.release();
  });
}

// Whether the copy is over, and the seconds that it took.
ZfMessage zf_copy_query(ZfCopy* copy, bool* over, double* seconds) noexcept {
  return zf::guarded([&] {
    *seconds = 0;
    *over = !copy->end.has_value() || copy->end->query();
    if (*over && copy->end.has_value()) {
      *seconds = copy->begin->elapsedTime(*copy->end) * 1e-3;
    }
  });
}

void zf_copy_free(ZfCopy* copy) noexcept {
  delete copy;
}

// Page-locked memory, not initialised.
ZfMessage zf_pinned(int64_t count, int scalar_type, ZfTensor* out) noexcept {
  return zf::guarded([&] {
    TORCH_CHECK(c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA), "this libtorch is built without CUDA");
    const auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(scalar_type)).pinned_memory(true);
    *out = new at::Tensor(at::empty({count}, options));
  });
}

} // extern "C"

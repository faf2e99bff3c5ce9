// PyTorch's own distributed parts: the TCP store, and process groups over Gloo (and NCCL, where it is built in) with
// point-to-point messages.

#include "shim.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#ifdef ZF_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

// Stores, groups and works are intrusive pointers behind a pointer of their own.
using ZfStore = c10::intrusive_ptr<c10d::Store>*;
using ZfGroup = c10::intrusive_ptr<c10d::Backend>*;
using ZfWork = c10::intrusive_ptr<c10d::Work>*;

// A network device of Gloo, shared by groups.
using ZfDevice = std::shared_ptr<::gloo::transport::Device>*;

// Receives bytes before the call that was given it returns. Never unwinds.
using ZfSink = void (*)(void* target, size_t index, const uint8_t* data, size_t length);

// Bytes on their way to C++.
struct ZfBytes {
  const uint8_t* data;
  size_t length;
};

namespace {

std::string text(const ZfBytes& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data), bytes.length);
}

std::vector<uint8_t> blob(const ZfBytes& bytes) {
  return std::vector<uint8_t>(bytes.data, bytes.data + bytes.length);
}

std::vector<std::string> texts(const ZfBytes* bytes, size_t count) {
  std::vector<std::string> result;
  result.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    result.push_back(text(bytes[i]));
  }
  return result;
}

} // namespace

extern "C" {

ZfMessage zf_store_tcp(
    ZfBytes host,
    uint16_t port,
    bool server,
    int64_t timeout_ms,
    ZfStore* out,
    uint16_t* bound) noexcept {
  return zf::guarded([&] {
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = server;
    options.waitWorkers = false;
    options.timeout = std::chrono::milliseconds(timeout_ms);
    auto store = c10::make_intrusive<c10d::TCPStore>(text(host), options);
    *bound = store->getPort();
    *out = new c10::intrusive_ptr<c10d::Store>(std::move(store));
  });
}

ZfMessage zf_store_prefix(ZfBytes prefix, ZfStore store, ZfStore* out) noexcept {
  return zf::guarded([&] {
    *out = new c10::intrusive_ptr<c10d::Store>(c10::make_intrusive<c10d::PrefixStore>(text(prefix), *store));
  });
}

ZfMessage zf_store_clone(ZfStore store, ZfStore* out) noexcept {
  return zf::guarded([&] { *out = new c10::intrusive_ptr<c10d::Store>((*store)->clone()); });
}

void zf_store_free(ZfStore store) noexcept {
  zf_message_free(zf::guarded([&] { delete store; }));
}

ZfMessage zf_store_set(ZfStore store, ZfBytes key, ZfBytes value) noexcept {
  return zf::guarded([&] { (*store)->set(text(key), blob(value)); });
}

ZfMessage zf_store_append(ZfStore store, ZfBytes key, ZfBytes value) noexcept {
  return zf::guarded([&] { (*store)->append(text(key), blob(value)); });
}

ZfMessage zf_store_compare_set(
    ZfStore store,
    ZfBytes key,
    ZfBytes expected,
    ZfBytes desired,
    void* target,
    ZfSink sink) noexcept {
  return zf::guarded([&] {
    const std::vector<uint8_t> now = (*store)->compareSet(text(key), blob(expected), blob(desired));
    sink(target, 0, now.data(), now.size());
  });
}

ZfMessage zf_store_check(ZfStore store, const ZfBytes* keys, size_t count, bool* out) noexcept {
  return zf::guarded([&] { *out = (*store)->check(texts(keys, count)); });
}

ZfMessage zf_store_wait(ZfStore store, const ZfBytes* keys, size_t count, int64_t timeout_ms) noexcept {
  return zf::guarded([&] { (*store)->wait(texts(keys, count), std::chrono::milliseconds(timeout_ms)); });
}

ZfMessage zf_store_get(
    ZfStore store,
    const ZfBytes* keys,
    size_t count,
    int64_t timeout_ms,
    void* target,
    ZfSink sink) noexcept {
  return zf::guarded([&] {
    const c10d::StoreTimeoutGuard guard(**store, std::chrono::milliseconds(timeout_ms));
    const std::vector<std::vector<uint8_t>> values = (*store)->multiGet(texts(keys, count));
    for (size_t i = 0; i < values.size(); ++i) {
      sink(target, i, values[i].data(), values[i].size());
    }
  });
}

ZfMessage zf_gloo_device(bool interface, ZfBytes name, ZfDevice* out) noexcept {
  return zf::guarded([&] {
    auto device = interface ? c10d::ProcessGroupGloo::createDeviceForInterface(text(name))
                            : c10d::ProcessGroupGloo::createDeviceForHostname(text(name));
    *out = new std::shared_ptr<::gloo::transport::Device>(std::move(device));
  });
}

void zf_gloo_device_free(ZfDevice device) noexcept {
  zf_message_free(zf::guarded([&] { delete device; }));
}

ZfMessage zf_group_gloo(
    ZfStore store,
    ZfDevice device,
    int rank,
    int size,
    int64_t timeout_ms,
    ZfGroup* out) noexcept {
  return zf::guarded([&] {
    auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::milliseconds(timeout_ms));
    options->devices.push_back(*device);
    // Point-to-point messages run on the device's thread; this pool is for collectives, which are not used.
    options->threads = 1;
    *out = new c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<c10d::ProcessGroupGloo>(*store, rank, size, std::move(options)));
  });
}

#ifdef ZF_NCCL
ZfMessage zf_group_nccl(ZfStore store, int rank, int size, int64_t timeout_ms, ZfGroup* out) noexcept {
  return zf::guarded([&] {
    auto options = c10d::ProcessGroupNCCL::Options::create();
    options->timeout = std::chrono::milliseconds(timeout_ms);
    *out = new c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<c10d::ProcessGroupNCCL>(*store, rank, size, std::move(options)));
  });
}
#endif

void zf_group_free(ZfGroup group) noexcept {
  zf_message_free(zf::guarded([&] { delete group; }));
}

ZfMessage zf_group_send(ZfGroup group, ZfTensor tensor, int to, int tag, ZfWork* out) noexcept {
  return zf::guarded([&] {
    std::vector<at::Tensor> tensors{*tensor};
    *out = new c10::intrusive_ptr<c10d::Work>((*group)->send(tensors, to, tag));
  });
}

ZfMessage zf_group_recv(ZfGroup group, ZfTensor tensor, int from, int tag, ZfWork* out) noexcept {
  return zf::guarded([&] {
    std::vector<at::Tensor> tensors{*tensor};
    *out = new c10::intrusive_ptr<c10d::Work>((*group)->recv(tensors, from, tag));
  });
}

// Batches the messages between begin and end, which NCCL needs so that they do not wait for each other in order.
ZfMessage zf_group_batch(ZfGroup group, bool begin, ZfWork* out) noexcept {
  return zf::guarded([&] {
    if (begin) {
      (*group)->startCoalescing();
    } else {
      auto work = (*group)->endCoalescing();
      *out = work ? new c10::intrusive_ptr<c10d::Work>(std::move(work)) : nullptr;
    }
  });
}

ZfMessage zf_work_wait(ZfWork work, int64_t timeout_ms, bool* completed) noexcept {
  return zf::guarded([&] { *completed = (*work)->wait(std::chrono::milliseconds(timeout_ms)); });
}

ZfMessage zf_work_abort(ZfWork work) noexcept {
  return zf::guarded([&] { (*work)->abort(); });
}

ZfMessage zf_work_is_completed(ZfWork work, bool* out) noexcept {
  return zf::guarded([&] { *out = (*work)->isCompleted(); });
}

void zf_work_free(ZfWork work) noexcept {
  zf_message_free(zf::guarded([&] { delete work; }));
}

} // extern "C"

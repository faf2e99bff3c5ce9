// Shared by all shim files: the tensor type of torch-sys, and errors as owned C strings.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <exception>
#include <stdexcept>
#include <vector>

// torch-sys hands out `torch::Tensor*` as `C_tensor*`.
using ZfTensor = at::Tensor*;

// An owned error message; a null pointer means success. Freed by `zf_message_free`.
using ZfMessage = char*;

// Tensors on their way between Rust and C++ in either direction.
struct ZfList {
  std::vector<at::Tensor> items;
};

extern "C" ZfMessage zf_message_new(const char* text, size_t length) noexcept;
extern "C" void zf_message_free(ZfMessage message) noexcept;

namespace zf {

// Copies `text` into an owned message.
ZfMessage message(const char* text) noexcept;

// Turns an error that a Rust callback returned into a C++ exception, and frees its message.
void raise_if(ZfMessage message);

// Runs `body`; whatever it throws becomes a message, so that nothing unwinds into Rust.
template <class Body>
ZfMessage guarded(Body&& body) noexcept {
  try {
    body();
    return nullptr;
  } catch (const c10::Error& error) {
    return message(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return message(error.what());
  } catch (...) {
    return message("a C++ exception that is not a std::exception");
  }
}

// A Rust value behind a pointer, dropped exactly once. Rust's drop function never unwinds.
class Owned {
 public:
  using Drop = void (*)(void*);
  Owned(void* value, Drop drop) noexcept : value_(value), drop_(drop) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    drop_(value_);
  }
  void* get() const noexcept {
    return value_;
  }

 private:
  void* value_;
  Drop drop_;
};

} // namespace zf

// As gloo/algorithm.h: the one member of gloo::Context that an inline function of c10d/ProcessGroupGloo.hpp calls.
// Contexts are made and destroyed inside libtorch_cpu.so, so that their layout does not matter here.
#pragma once

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

} // namespace gloo

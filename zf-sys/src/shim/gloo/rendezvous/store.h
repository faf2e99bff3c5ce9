// As gloo/algorithm.h: the abstract class that c10d's GlooStore derives from. Only libtorch_cpu.so makes objects of it,
// so that the order of its virtual functions does not matter here.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace gloo {
namespace rendezvous {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::vector<char>& value) = 0;
  virtual std::vector<char> get(const std::string& key) = 0;
  virtual void wait(const std::vector<std::string>& keys) = 0;
  virtual void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) = 0;
};

} // namespace rendezvous
} // namespace gloo

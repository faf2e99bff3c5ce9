// As gloo/algorithm.h: types that c10d/ProcessGroupGloo.hpp holds by shared or unique pointer.
#pragma once

namespace gloo {
namespace transport {

class Device;
class UnboundBuffer;

} // namespace transport
} // namespace gloo

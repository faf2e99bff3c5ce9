// As gloo/algorithm.h: named by c10d/ProcessGroupGloo.hpp, which needs nothing from it.
#pragma once

// Part of the declarations of Gloo that c10d/ProcessGroupGloo.hpp names and libtorch does not ship; that header needs
// nothing from this file. Gloo itself is inside libtorch_cpu.so.
#pragma once

// The plain data that goes in and out of the core, for Python.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>

#include "core/device.h"

namespace cumem {

struct DeviceInfo {
  std::string name;
  std::size_t total_bytes = 0;
  std::size_t free_bytes = 0;
  std::size_t granularity = 0;
  std::size_t peers = 0;
  Features features;  // that work
  Features offered;
};

void bind_requests(pybind11::module_& m);
void bind_reports(pybind11::module_& m);

}  // namespace cumem

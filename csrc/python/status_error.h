// How does a Status become a Python exception?
//
// As `_C.StatusError`, which carries the fields; cumem.errors makes the public
// exception and its message of it.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <string>

#include "core/driver.h"
#include "core/status.h"

namespace cumem {

class StatusError : public std::exception {
 public:
  StatusError(const Status& status, std::string detail, const Driver* driver);
  const char* what() const noexcept override { return detail_.c_str(); }
  const Status& status() const noexcept { return status_; }
  const std::string& code_name() const noexcept { return code_name_; }

 private:
  Status status_;
  std::string detail_;
  std::string code_name_;
};

// Throws StatusError unless `status` is ok.
void require(const Status& status, const Driver& driver);
// Throws in a child of the process that set cumem up.
void refuse_child();

void bind_status(pybind11::module_& m);

}  // namespace cumem

#include "python/status_error.h"

#include <utility>

#include "torch/plugin.h"

namespace py = pybind11;

namespace cumem {
namespace {

py::handle error_type;

void raise(const StatusError& error) {
  py::object instance = py::reinterpret_borrow<py::object>(error_type)(error.what());
  const Status& status = error.status();
  instance.attr("fault") = fault_name(status.fault);
  instance.attr("code") = static_cast<int>(status.code);
  instance.attr("code_name") = error.code_name();
  instance.attr("call") = status.call;
  instance.attr("bytes") = status.bytes;
  instance.attr("device") = status.device;
  instance.attr("free_bytes") = status.free_bytes;
  instance.attr("address") = status.address;
  instance.attr("error") = status.error;
  instance.attr("path") = status.path ? *status.path : std::string();
  PyErr_SetObject(error_type.ptr(), instance.ptr());
}

}  // namespace

StatusError::StatusError(const Status& status, std::string detail, const Driver* driver)
    : status_(status), detail_(std::move(detail)) {
  if (status.code != CUDA_SUCCESS)
    code_name_ = driver != nullptr ? driver->error_name(status.code)
                                   : "CUDA error " + std::to_string(status.code);
}

void require(const Status& status, const Driver& driver) {
  if (!status.ok()) throw StatusError(status, status.call, &driver);
}

void refuse_child() {
  if (plugin::forked()) throw StatusError(failure(Fault::forked, "fork"), "fork", nullptr);
}

void bind_status(py::module_& m) {
  error_type = PyErr_NewException("cumem._C.StatusError", PyExc_RuntimeError, nullptr);
  m.attr("StatusError") = error_type;
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const StatusError& error) {
      raise(error);
    }
  });
}

}  // namespace cumem

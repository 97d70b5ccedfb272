#include "python/memory.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/status_error.h"
#include "python/without_gil.h"
#include "torch/plugin.h"

namespace py = pybind11;

namespace cumem {
namespace {

struct MemoryView {
  std::shared_ptr<Memory> memory;
  CUdeviceptr address = 0;
  std::size_t bytes = 0;
};

MemoryView view_of(std::shared_ptr<Memory> memory, std::size_t offset, std::size_t bytes) {
  if (offset > memory->capacity() || bytes > memory->capacity() - offset)
    throw py::value_error("a view must lie in its memory");
  const CUdeviceptr address = memory->address() + offset;
  return {std::move(memory), address, bytes};
}

// Host memory, as the emulator's is; of a GPU's memory torch asks the interface below.
py::buffer_info host_buffer(const MemoryView& view) {
  return py::buffer_info(reinterpret_cast<unsigned char*>(view.address),
                         static_cast<py::ssize_t>(view.bytes));
}

py::dict cuda_array_interface(const MemoryView& view) {
  py::dict interface;
  interface["shape"] = py::make_tuple(view.bytes);
  interface["typestr"] = "|u1";
  interface["data"] = py::make_tuple(view.address, false);
  interface["version"] = 2;
  return interface;
}

std::shared_ptr<Memory> allocate(std::shared_ptr<Allocator> allocator, std::size_t bytes,
                                 int ordinal, std::uintptr_t stream, const Owner& owner,
                                 std::size_t chunk_bytes, std::size_t capacity) {
  refuse_child();
  const Extent extent{bytes, chunk_bytes, capacity};
  CUdeviceptr address = 0;
  Status status =
      allocator->malloc(extent, ordinal, reinterpret_cast<CUstream>(stream), owner, address);
  Device* device = nullptr;
  std::size_t total = 0;
  if (status.fault == Fault::device_memory && allocator->device(ordinal, &device).ok())
    (void)device->memory(status.free_bytes, total);
  require(status, allocator->driver());
  return std::make_shared<Memory>(std::move(allocator), address, extent);
}

// Parts: offset in the segment, offset in the file, bytes.
using Part = std::tuple<std::size_t, std::uint64_t, std::size_t>;

// What only saves time makes room for the pages.
Status map_pages(Allocator& allocator, Source& source) {
  Status status = MappedFile::make(allocator.host(), *source.file, source.mapped);
  if (status.fault == Fault::host_memory && allocator.release_host() > 0)
    status = MappedFile::make(allocator.host(), *source.file, source.mapped);
  return status;
}

std::shared_ptr<Memory> from_file(std::shared_ptr<Allocator> allocator, std::size_t bytes,
                                  int ordinal, const Owner& owner, std::shared_ptr<File> file,
                                  const std::vector<Part>& parts, bool keep, bool pin) {
  refuse_child();
  auto source = std::make_unique<Source>();
  source->file = std::move(file);
  source->keep = keep;
  if (pin) require(map_pages(*allocator, *source), allocator->driver());
  for (const auto& [at, offset, size] : parts) source->parts.push_back({{at, size}, offset});
  CUdeviceptr address = 0;
  require(allocator->reserve(bytes, ordinal, owner, std::move(source), address),
          allocator->driver());
  return std::make_shared<Memory>(std::move(allocator), address, Extent{bytes});
}

// Parts here: address, offset in the file, bytes.
void read_into(const File& file, Allocator& allocator, const std::vector<Part>& parts) {
  refuse_child();
  std::vector<FilePart> wanted;
  for (const auto& [address, offset, size] : parts) wanted.push_back({{address, size}, offset});
  require(allocator.read_into(file, wanted), allocator.driver());
}

std::shared_ptr<File> hold(int descriptor, std::string path, std::size_t header_bytes) {
  std::shared_ptr<File> file;
  Status status = File::adopt(descriptor, std::move(path), header_bytes, file);
  if (!status.ok()) throw StatusError(status, status.call, nullptr);
  return file;
}

}  // namespace

// Free may wait for the device, and the GIL is above every lock of ours.
Memory::~Memory() {
  if (plugin::forked()) return;
  std::optional<py::gil_scoped_release> unlocked;
  if (PyGILState_Check() != 0) unlocked.emplace();
  allocator_->free(address_);
}

void bind_memory(py::module_& m) {
  py::class_<File, std::shared_ptr<File>>(m, "File")
      .def(py::init(&hold), py::arg("descriptor"), py::arg("path"), py::arg("header_bytes"),
           py::call_guard<py::gil_scoped_release>())
      .def("read_into", &read_into, py::arg("allocator"), py::arg("parts"),
           py::call_guard<WithoutGil>());
  py::class_<MemoryView>(m, "MemoryView", py::buffer_protocol())
      .def_buffer(&host_buffer)
      .def_property_readonly("__cuda_array_interface__", &cuda_array_interface);
  py::class_<Memory, std::shared_ptr<Memory>>(m, "Memory")
      .def(py::init(&allocate), py::arg("allocator"), py::arg("bytes"), py::arg("device"),
           py::arg("stream"), py::arg("owner"), py::arg("chunk_bytes") = 0, py::arg("capacity") = 0,
           py::call_guard<py::gil_scoped_release>())
      .def_static("from_file", &from_file, py::arg("allocator"), py::arg("bytes"),
                  py::arg("device"), py::arg("owner"), py::arg("file"), py::arg("parts"),
                  py::arg("keep"), py::arg("pin") = false, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("address", &Memory::address)
      .def_property_readonly("bytes", &Memory::bytes)
      .def("view", &view_of, py::arg("offset"), py::arg("bytes"));
}

}  // namespace cumem

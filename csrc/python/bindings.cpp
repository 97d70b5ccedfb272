// How does Python reach the core? One class for each thing, one method for each
// call, no decisions. Calls that can take long release the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/allocator.h"
#include "core/host_memory.h"
#include "python/memory.h"
#include "python/reports.h"
#include "python/status_error.h"
#include "python/without_gil.h"
#include "torch/plugin.h"

namespace py = pybind11;

namespace cumem {
namespace {

using Unlocked = py::call_guard<WithoutGil>;

CUstream as_stream(std::uintptr_t handle) { return reinterpret_cast<CUstream>(handle); }

std::shared_ptr<Driver> load_driver(const std::string& path) {
  std::unique_ptr<Driver> driver;
  std::string detail;
  Status status = Driver::load(path, driver, detail);
  if (!status.ok()) throw StatusError(status, detail, nullptr);
  return driver;
}

int device_count(const Driver& driver) {
  int count = 0;
  require(check(driver.cuDeviceGetCount(&count), "cuDeviceGetCount"), driver);
  return count;
}

std::map<std::string, std::uint64_t> ledger(const Driver& driver) {
  const Ledger& book = driver.ledger();
  return {{"handles_created", book.handles_created},
          {"handles_released", book.handles_released},
          {"physical_bytes", book.physical_bytes},
          {"mappings", book.mappings},
          {"reservations", book.reservations},
          {"reserved_bytes", book.reserved_bytes},
          {"registered_bytes", book.registered_bytes},
          {"refused", book.refused},
          {"refused_bytes", book.refused_bytes},
          {"last_refusal", static_cast<std::uint64_t>(book.last_refusal)}};
}

Device& open_device(Allocator& allocator, int ordinal) {
  refuse_child();
  Device* device = nullptr;
  require(allocator.device(ordinal, &device), allocator.driver());
  return *device;
}

DeviceInfo device_info(Allocator& allocator, int ordinal) {
  Device& device = open_device(allocator, ordinal);
  DeviceInfo info;
  char name[256] = {};
  const Driver& driver = allocator.driver();
  require(check(driver.cuDeviceGetName(name, sizeof(name), device.handle()), "cuDeviceGetName"),
          driver);
  require(device.memory(info.free_bytes, info.total_bytes), driver);
  info.name = name;
  info.granularity = device.granularity();
  info.peers = device.access().size() - 1;
  info.features = device.features();
  info.offered = device.offered();
  return info;
}

std::pair<SleepResult, WakeResult> exchange(Allocator& allocator, const SwitchRequest& request) {
  refuse_child();
  SwitchResult result;
  require(allocator.exchange(request, result), allocator.driver());
  return {result.sleep, result.wake};
}

SleepResult sleep(Allocator& allocator, const SleepRequest& request) {
  refuse_child();
  SleepResult result;
  require(allocator.sleep(request, result), allocator.driver());
  return result;
}

WakeResult wake(Allocator& allocator, const WakeRequest& request) {
  refuse_child();
  WakeResult result;
  require(allocator.wake(request, result), allocator.driver());
  return result;
}

void resize(Allocator& allocator, const std::vector<std::pair<CUdeviceptr, std::size_t>>& wanted) {
  refuse_child();
  ResizeRequest request;
  for (const auto& [address, bytes] : wanted) request.segments.push_back({address, bytes});
  require(allocator.resize(request), allocator.driver());
}

CUdeviceptr allocate(Allocator& allocator, std::size_t bytes, int device, std::uintptr_t stream,
                     const Owner& owner) {
  refuse_child();
  CUdeviceptr address = 0;
  require(allocator.malloc(bytes, device, as_stream(stream), owner, address), allocator.driver());
  return address;
}

void watch(Allocator& allocator, int device, const std::vector<std::uintptr_t>& handles) {
  std::vector<CUstream> streams;
  for (std::uintptr_t handle : handles) streams.push_back(as_stream(handle));
  open_device(allocator, device).watch(std::move(streams));
}

void verify(Allocator& allocator) {
  refuse_child();
  require(allocator.verify(), allocator.driver());
}

std::size_t release_host(Allocator& allocator) {
  refuse_child();
  return allocator.release_host();
}

void load_digester(Allocator& allocator, int device, const py::bytes& image) {
  refuse_child();
  const std::string text = image;  // ends with a zero byte, as PTX must
  WithoutGil unlocked;
  require(allocator.load_digester(device, text.data()), allocator.driver());
}

void prepare_host(Allocator& allocator, std::size_t bytes, int ordinal) {
  Device& device = open_device(allocator, ordinal);
  RelaxedCapture relaxed(allocator.driver());
  ContextGuard context(device);
  require(context.status(), allocator.driver());
  require(allocator.host().prepare(bytes, device), allocator.driver());
}

void read_backup(Allocator& allocator, CUdeviceptr address, std::size_t bytes,
                 std::uintptr_t into) {
  require(allocator.read_backup({address, bytes}, reinterpret_cast<std::byte*>(into)),
          allocator.driver());
}

void bind_progress(py::module_& m) {
  py::class_<WakeProgress, std::shared_ptr<WakeProgress>>(m, "WakeProgress")
      .def(py::init<>())
      .def(
          "expect",
          [](WakeProgress& self, CUdeviceptr segment, std::size_t bytes) {
            self.expect({segment, bytes});
          },
          py::arg("segment"), py::arg("bytes"))
      .def(
          "hold",
          [](WakeProgress& self, const Allocator& allocator, CUdeviceptr address,
             std::uintptr_t stream) {
            require(self.hold(address, as_stream(stream)), allocator.driver());
          },
          py::arg("allocator"), py::arg("address"), py::arg("stream"), Unlocked())
      .def(
          "wait",
          [](WakeProgress& self, const Allocator& allocator, CUdeviceptr address) {
            require(self.wait(address), allocator.driver());
          },
          py::arg("allocator"), py::arg("address"), Unlocked())
      .def("reached", &WakeProgress::reached, py::arg("address"), Unlocked())
      .def(
          "give_up",
          [](WakeProgress& self) { self.finish(failure(Fault::driver, "a wake that gave up")); },
          Unlocked());
}

void bind_driver(py::module_& m) {
  py::class_<Driver, std::shared_ptr<Driver>>(m, "Driver")
      .def_property_readonly("path", &Driver::path)
      .def_property_readonly("version", &Driver::version)
      .def_property_readonly("device_count", &device_count)
      .def("ledger", &ledger);
  m.def("load_driver", &load_driver, py::arg("path"), Unlocked());
}

Config make_config(std::size_t chunk_bytes, std::size_t margin_bytes, std::size_t host_limit_bytes,
                   bool pin_backups, bool allow_pageable, bool retain_backup, unsigned threads,
                   FileConfig file) {
  Config config;
  config.file = std::move(file);
  config.chunk_bytes = chunk_bytes;
  config.margin_bytes = margin_bytes;
  config.host.limit_bytes = host_limit_bytes;
  config.host.pin_backups = pin_backups;
  config.host.allow_pageable = allow_pageable;
  config.host.retain = retain_backup;
  config.host.touch_threads = threads;
  return config;
}

void bind_allocator(py::module_& m) {
  py::class_<FileConfig>(m, "FileConfig")
      .def(py::init([](unsigned threads, std::size_t buffer_bytes, std::size_t ring_bytes,
                       std::string folder) {
             return FileConfig{threads, buffer_bytes, ring_bytes, std::move(folder)};
           }),
           py::kw_only(), py::arg("threads"), py::arg("buffer_bytes"), py::arg("ring_bytes"),
           py::arg("folder"));
  py::class_<Config>(m, "Config")
      .def(py::init(&make_config), py::kw_only(), py::arg("chunk_bytes"), py::arg("margin_bytes"),
           py::arg("host_limit_bytes"), py::arg("pin_backups"), py::arg("allow_pageable"),
           py::arg("retain_backup"), py::arg("threads"), py::arg("file"));
  py::class_<Allocator, std::shared_ptr<Allocator>>(m, "Allocator")
      .def(py::init([](std::shared_ptr<Driver> driver, const Config& config) {
             return std::make_shared<Allocator>(std::move(driver), config);
           }),
           py::arg("driver"), py::arg("config"))
      .def("malloc", &allocate, py::arg("bytes"), py::arg("device"), py::arg("stream"),
           py::arg("owner"), Unlocked())
      .def("free", &Allocator::free, py::arg("address"), Unlocked())
      .def(
          "sleep",
          [](Allocator& self, std::vector<SegmentPlan> plans, CleanCheck clean_check, bool verify) {
            return sleep(self, SleepRequest{std::move(plans), clean_check, verify});
          },
          py::arg("plans"), py::arg("clean_check"), py::arg("verify"), Unlocked())
      .def(
          "wake",
          [](Allocator& self, std::vector<CUdeviceptr> segments, std::optional<unsigned char> fill,
             bool verify, std::shared_ptr<WakeProgress> progress) {
            return wake(self, WakeRequest{std::move(segments), fill, verify, std::move(progress)});
          },
          py::arg("segments"), py::arg("fill"), py::arg("verify"), py::arg("progress"), Unlocked())
      .def(
          "exchange",
          [](Allocator& self, std::vector<SegmentPlan> plans, CleanCheck clean_check,
             std::vector<CUdeviceptr> segments, std::optional<unsigned char> fill) {
            SwitchRequest request;
            request.sleep.segments = std::move(plans);
            request.sleep.clean_check = clean_check;
            request.wake.segments = std::move(segments);
            request.wake.fill = fill;
            return exchange(self, request);
          },
          py::arg("plans"), py::arg("clean_check"), py::arg("segments"), py::arg("fill"),
          Unlocked())
      .def("resize", &resize, py::arg("segments"), Unlocked())
      .def("is_awake", &Allocator::is_awake, py::arg("address"), py::arg("bytes"))
      .def("owner_of", &Allocator::owner_of, py::arg("address"))
      .def("assign", &Allocator::assign, py::arg("segment"), py::arg("owner"))
      .def("segments", &Allocator::segments)
      .def("changed_sources", &Allocator::changed_sources, py::arg("segments"), Unlocked())
      .def("sleeping_pools", &Allocator::sleeping_pools)
      .def("counters", &Allocator::counters)
      .def("verify", &verify, Unlocked())
      .def("catch_up", &Allocator::catch_up, Unlocked())
      .def("capturing", &Allocator::capturing, py::arg("device"), Unlocked())
      .def("watch", &watch, py::arg("device"), py::arg("streams"), Unlocked())
      .def("device_info", &device_info, py::arg("device"), Unlocked())
      .def("host_usage", [](Allocator& self) { return self.host().usage(); })
      .def("host_pieces", [](Allocator& self) { return self.host().pieces(); })
      .def("release_host", &release_host, Unlocked())
      .def("load_digester", &load_digester, py::arg("device"), py::arg("image"))
      .def("has_digester", &Allocator::has_digester, py::arg("device"))
      .def("read_backup", &read_backup, py::arg("address"), py::arg("bytes"), py::arg("into"),
           Unlocked())
      .def("prepare_host", &prepare_host, py::arg("bytes"), py::arg("device"), Unlocked())
      .def("configure", &Allocator::configure, py::arg("config"))
      .def("live_segments", &Allocator::live_segments)
      .def("file_bytes", &Allocator::file_bytes);
}

void bind_plugin(py::module_& m) {
  m.def("install", &plugin::install, py::arg("allocator"), Unlocked());
  m.def("current", &plugin::current);
  m.def("push_scope", &plugin::push_scope, py::arg("device"), py::arg("owner"));
  m.def("pop_scope", &plugin::pop_scope, py::arg("number"));
  m.def("set_graph_owner", &plugin::set_graph_owner, py::arg("owner"));
  m.def("forked", &plugin::forked);
  m.def("available_host_bytes", [] { return available_host_bytes(); });
}

}  // namespace
}  // namespace cumem

PYBIND11_MODULE(_C, m, py::mod_gil_not_used()) {
  cumem::bind_status(m);
  cumem::bind_driver(m);
  cumem::bind_requests(m);
  cumem::bind_reports(m);
  cumem::bind_progress(m);
  cumem::bind_allocator(m);
  cumem::bind_memory(m);
  cumem::bind_plugin(m);
}

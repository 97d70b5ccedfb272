#include "python/reports.h"

#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "core/requests.h"

namespace py = pybind11;

namespace cumem {
namespace {

std::vector<Range> as_ranges(const std::vector<std::pair<CUdeviceptr, std::size_t>>& pairs) {
  std::vector<Range> ranges;
  for (const auto& [address, bytes] : pairs) ranges.push_back({address, bytes});
  return ranges;
}

}  // namespace

void bind_requests(py::module_& m) {
  py::class_<Owner>(m, "Owner")
      .def(py::init([](std::string tag, std::string policy, std::uint64_t pool, bool graph) {
             return Owner{std::move(tag), std::move(policy), pool, graph};
           }),
           py::arg("tag"), py::arg("policy"), py::kw_only(), py::arg("pool") = 0,
           py::arg("graph") = false)
      .def_readonly("tag", &Owner::tag)
      .def_readonly("policy", &Owner::policy)
      .def_readonly("pool", &Owner::pool)
      .def_readonly("graph", &Owner::graph);
  py::enum_<Store>(m, "Store")
      .value("host", Store::host)
      .value("disk", Store::disk)
      .value("source", Store::source);
  py::class_<SegmentPlan>(m, "SegmentPlan")
      .def(py::init([](CUdeviceptr segment,
                       const std::vector<std::pair<CUdeviceptr, std::size_t>>& backup,
                       const std::vector<std::pair<CUdeviceptr, std::size_t>>& unchanged,
                       Store store) {
             return SegmentPlan{segment, as_ranges(backup), as_ranges(unchanged), store};
           }),
           py::arg("segment"), py::arg("backup"), py::arg("unchanged"), py::arg("store"));
  py::enum_<CleanCheck>(m, "CleanCheck")
      .value("digest", CleanCheck::digest)
      .value("never", CleanCheck::never)
      .value("declared", CleanCheck::declared);
  py::class_<SleepResult>(m, "SleepResult")
      .def_readonly("freed_bytes", &SleepResult::freed_bytes)
      .def_readonly("copied_bytes", &SleepResult::copied_bytes)
      .def_readonly("disk_bytes", &SleepResult::disk_bytes)
      .def_readonly("reload_bytes", &SleepResult::reload_bytes)
      .def_readonly("pageable_bytes", &SleepResult::pageable_bytes)
      .def_readonly("digested", &SleepResult::digested)
      .def_readonly("segments", &SleepResult::segments)
      .def_readonly("phases", &SleepResult::phases);
  py::class_<WakeResult>(m, "WakeResult")
      .def_readonly("mapped_bytes", &WakeResult::mapped_bytes)
      .def_readonly("restored_bytes", &WakeResult::restored_bytes)
      .def_readonly("segments", &WakeResult::segments)
      .def_readonly("phases", &WakeResult::phases);
}

void bind_reports(py::module_& m) {
  py::class_<SegmentInfo>(m, "SegmentInfo")
      .def_readonly("address", &SegmentInfo::address)
      .def_readonly("bytes", &SegmentInfo::bytes)
      .def_readonly("asked_bytes", &SegmentInfo::asked_bytes)
      .def_readonly("mapped_bytes", &SegmentInfo::mapped_bytes)
      .def_readonly("mapped_chunks", &SegmentInfo::mapped_chunks)
      .def_readonly("handles", &SegmentInfo::handles)
      .def_readonly("backup_bytes", &SegmentInfo::backup_bytes)
      .def_readonly("pinned_file_bytes", &SegmentInfo::pinned_file_bytes)
      .def_readonly("device", &SegmentInfo::device)
      .def_readonly("owner", &SegmentInfo::owner)
      // Its fields, for loops: the owner itself is wrapped anew at every look at it.
      .def_property_readonly("tag", [](const SegmentInfo& info) { return info.owner.tag; })
      .def_property_readonly("policy", [](const SegmentInfo& info) { return info.owner.policy; })
      .def_property_readonly("pool", [](const SegmentInfo& info) { return info.owner.pool; })
      .def_property_readonly("graph", [](const SegmentInfo& info) { return info.owner.graph; })
      .def_readonly("serial", &SegmentInfo::serial)
      .def_property_readonly(
          "asleep", [](const SegmentInfo& info) { return info.state == SegmentState::asleep; });
  py::class_<FreeCounters>(m, "FreeCounters")
      .def_readonly("unknown", &FreeCounters::unknown)
      .def_readonly("deferred", &FreeCounters::deferred)
      .def_readonly("waiting", &FreeCounters::waiting)
      .def_readonly("refused", &FreeCounters::refused)
      .def_readonly("quarantined", &FreeCounters::quarantined)
      .def_readonly("quarantined_bytes", &FreeCounters::quarantined_bytes)
      .def_readonly("failed_mallocs", &FreeCounters::failed_mallocs);
  py::class_<HostUsage>(m, "HostUsage")
      .def_readonly("held_bytes", &HostUsage::held_bytes)
      .def_readonly("used_bytes", &HostUsage::used_bytes)
      .def_readonly("idle_bytes", &HostUsage::idle_bytes)
      .def_readonly("pageable_bytes", &HostUsage::pageable_bytes);
  py::class_<DeviceInfo>(m, "DeviceInfo")
      .def_readonly("name", &DeviceInfo::name)
      .def_readonly("total_bytes", &DeviceInfo::total_bytes)
      .def_readonly("free_bytes", &DeviceInfo::free_bytes)
      .def_readonly("granularity", &DeviceInfo::granularity)
      .def_readonly("peers", &DeviceInfo::peers)
      .def_property_readonly("posix_handle",
                             [](const DeviceInfo& info) { return info.features.posix_handle; })
      .def_property_readonly("gpu_direct_rdma",
                             [](const DeviceInfo& info) { return info.features.gpu_direct_rdma; })
      .def_property_readonly("posix_handle_offered",
                             [](const DeviceInfo& info) { return info.offered.posix_handle; })
      .def_property_readonly("gpu_direct_rdma_offered",
                             [](const DeviceInfo& info) { return info.offered.gpu_direct_rdma; });
}

}  // namespace cumem

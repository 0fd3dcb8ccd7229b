// What Python sees.
#include "group.h"

#include <pthread.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

namespace sim {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// `host(store, rank, size, timeout)` makes a gloo group.
void set_host_groups(py::object host) {
  make_host_group = [held = new py::object(std::move(host))](
                        const StorePtr& store, int rank, int size, Milliseconds timeout) {
    py::gil_scoped_acquire gil;
    return (*held)(store, rank, size, timeout).cast<BackendPtr>();
  };
}

void bind_groups(py::module& module) {
  py::class_<GroupOptions, c10::intrusive_ptr<GroupOptions>, c10d::Backend::Options>(module, "Options")
      .def("__deepcopy__", [](const GroupOptions& self, py::object) { return c10::make_intrusive<GroupOptions>(self); });
  py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(module, "Group")
      .def(py::init([](const StorePtr& store, const BackendPtr& host, Milliseconds timeout) {
        return c10::make_intrusive<Group>(store, host, timeout);
      }))
      .def_property_readonly("options", &Group::getBackendOptions)
      .def("get_error", &Group::getError)
      .def("_set_default_timeout", &Group::setTimeout)
      .def("_is_initialized", [](const Group&) { return true; })
      .def("meet_for_split", &Group::meet_for_split)
      .def("perform_nocolor_split", [](Group& self, const at::Device&) { self.meet_for_split(); })
      .def("comm_split_count", &Group::splits);
  module.def("set_host_groups", set_host_groups);
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(torch_sim_C, module) {
  using namespace sim;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  at::setHostAllocator(kDevice, &pinned_allocator);
  pthread_atfork(nullptr, nullptr, [] { forked_after_opening = opened; });
  bind_groups(module);
  module.def("device_count", device_count);
  module.def("set_device", set_device);
  module.def("current_device", [] { return current_device; });
  module.def("opened", [] { return opened; });
  module.def("forked_after_opening", [] { return forked_after_opening; });
  module.def("memory_bytes", [] { return settings().memory_bytes; });
  module.def("default_generator", [](int device) { return hooks.getDefaultGenerator(device); });
  module.def("seed_all", [](int64_t seed) { seed_all(uint64_t(seed)); });
  module.def("register_host", [](size_t address, size_t bytes) {
    open_device();
    return register_host(reinterpret_cast<void*>(address), bytes);
  });
  module.def("fail_at", fail_at);
  module.def("counts", [] {
    Lock lock(state.mutex);
    return state.counts;
  });
  module.def("pending", [] {
    Lock lock(state.mutex);
    std::map<std::string, uint64_t> left;
    for (auto& [key, stream] : state.streams) {
      left[std::to_string(key.first) + "/" + std::to_string(key.second)] = stream->queued - stream->done;
    }
    return left;
  });
}

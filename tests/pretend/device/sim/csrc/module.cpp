// What Python sees.
#include "device.h"

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <condition_variable>
#include <mutex>

namespace sim {
c10::intrusive_ptr<c10d::Backend> make_backend(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size, double limit, bool eager);

static PyObject* python_hook = nullptr;
static void tell_python(const char* what) {
  if (!Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire gil;
  if (python_hook) try { pybind11::reinterpret_borrow<pybind11::object>(python_hook)(std::string(what)); } catch (pybind11::error_already_set& e) { e.discard_as_unraisable(what); }
}

static std::mutex stall_lock;
static std::condition_variable stall_over;
// The host, where it waits for a device that has stopped.
static void wait_out(const char*) {
  std::optional<pybind11::gil_scoped_release> no_gil;
  if (PyGILState_Check()) no_gil.emplace();
  std::unique_lock<std::mutex> hold(stall_lock);
  stall_over.wait(hold, [] { return !stalled.load(); });
}

// What `self.data = data` does, without torch's list of device types.
static void set_data(const at::Tensor& self, const at::Tensor& data) {
  if (auto* meta = torch::autograd::impl::get_autograd_meta(self)) {
    std::lock_guard<std::mutex> hold(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
  self.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}
}  // namespace sim

PYBIND11_MODULE(_sim, m) {
  namespace py = pybind11;
  m.def("device_count", &sim::count);
  m.def("current_device", &sim::current);
  m.def("set_device", &sim::set_current);
  m.def("memory", [](int i) { return py::make_tuple(sim::stats[i].now.load(), sim::stats[i].peak.load(), sim::stats[i].allocations.load()); });
  m.def("reset_peak", [](int i) { sim::stats[i].peak = sim::stats[i].now.load(); });
  m.def("set_capacity", [](int64_t bytes) { sim::capacity = bytes; });
  m.def("on_sync", [](py::object hook) {
    auto* old = sim::python_hook;
    sim::python_hook = hook.is_none() ? nullptr : hook.release().ptr();
    sim::sync_hook = sim::python_hook ? &sim::tell_python : nullptr;
    Py_XDECREF(old);
  });
  m.def("stall", [](bool on) {
    {
      std::lock_guard<std::mutex> hold(sim::stall_lock);
      sim::stalled = on;
      sim::sync_hook = on ? &sim::wait_out : nullptr;
    }
    sim::stall_over.notify_all();
  });
  m.def("default_generator", [](int i) { return at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::PrivateUse1, i)); });
  m.def("make_backend", &sim::make_backend);
  m.def("set_data", &sim::set_data);
}

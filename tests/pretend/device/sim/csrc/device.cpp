// Device type "sim" on PrivateUse1: memory, current device, streams, generators. Work is done when it is asked for.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace sim {
using c10::Device;
using c10::DeviceIndex;
constexpr auto kSim = c10::DeviceType::PrivateUse1;

std::array<Stats, kMost> stats;
std::atomic<int64_t> capacity{0};
std::atomic<SyncHook> sync_hook{nullptr};
std::atomic<bool> stalled{false};
static thread_local int current_index = 0;

int count() {
  static const int n = [] {
    const char* text = std::getenv("SIM_DEVICES");
    return std::clamp(text ? std::atoi(text) : 4, 0, kMost);
  }();
  return n;
}
int current() { return current_index; }
void set_current(int index) {
  TORCH_CHECK(index >= 0 && index < count(), "sim:", index, " does not exist; there are ", count(), " devices");
  current_index = index;
}
void note_sync(const char* what) {
  if (auto hook = sync_hook.load()) hook(what);
}

// ---- memory ----
struct Block {
  void* start;
  size_t size;
  int device;
};
static void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  stats[block->device].now -= static_cast<int64_t>(block->size);
  std::memset(block->start, 0xFF, block->size);  // who still reads it, reads NaN
  std::free(block->start);
  delete block;
}
struct Memory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    const int device = current_index;
    auto& mine = stats[device];
    const auto room = capacity.load();
    TORCH_CHECK_WITH(OutOfMemoryError, !room || mine.now + static_cast<int64_t>(size) <= room,
                     "sim:", device, " out of memory: ", size, " more bytes than the ", room, " with ", mine.now.load(), " in use");
    void* start = nullptr;
    if (size) TORCH_CHECK(posix_memalign(&start, 64, size) == 0, "host out of memory");
    if (!size) return {nullptr, Device(kSim, device)};
    std::memset(start, 0xFF, size);  // uninitialised: NaN in every float type
    const auto now = mine.now += static_cast<int64_t>(size);
    auto peak = mine.peak.load();
    while (now > peak && !mine.peak.compare_exchange_weak(peak, now)) {}
    mine.allocations++;
    return {start, new Block{start, size, device}, &give_back, Device(kSim, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats told;
    for (auto* each : {&told.allocated_bytes, &told.reserved_bytes, &told.active_bytes}) {
      (*each)[0].current = stats[index].now;
      (*each)[0].peak = stats[index].peak;
    }
    return told;
  }
  void resetAccumulatedStats(DeviceIndex index) override { stats[index].allocations = 0; }
  void resetPeakStats(DeviceIndex index) override { stats[index].peak = stats[index].now.load(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    const size_t all = capacity ? capacity.load() : size_t(1) << 36;
    return {all - stats[index].now, all};
  }
};
static Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory)

// Pinned host memory: plain memory that is remembered.
static std::mutex pins_lock;
static std::map<const char*, size_t> pins;
struct Pinned final : c10::Allocator {
  static void unpin(void* start) {
    std::lock_guard<std::mutex> hold(pins_lock);
    pins.erase(static_cast<const char*>(start));
    std::free(start);
  }
  c10::DataPtr allocate(size_t size) override {
    void* start = nullptr;
    TORCH_CHECK(posix_memalign(&start, 64, std::max<size_t>(size, 1)) == 0, "host out of memory");
    std::lock_guard<std::mutex> hold(pins_lock);
    pins[static_cast<const char*>(start)] = std::max<size_t>(size, 1);
    return {start, start, &unpin, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
static Pinned pinned;
static bool is_pinned(const void* at) {
  std::lock_guard<std::mutex> hold(pins_lock);
  auto next = pins.upper_bound(static_cast<const char*>(at));
  if (next == pins.begin()) return false;
  --next;
  return static_cast<const char*>(at) < next->first + next->second;
}

// ---- current device, streams, events: nothing is ever on its way, so nothing waits ----
static std::atomic<int64_t> last_stream{0};
static thread_local std::array<int64_t, kMost> streams{};
struct Mark {  // of an event
  std::chrono::steady_clock::time_point when;
  bool late;  // recorded when the device had stopped
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return Device(kSim, current_index); }
  void setDevice(Device device) const override {
    if (device.has_index()) set_current(device.index());
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current_index = device.index();
  }
  c10::Stream stream(Device device, int64_t id) const {
    return c10::Stream(c10::Stream::UNSAFE, Device(kSim, device.has_index() ? device.index() : current_index), id);
  }
  c10::Stream getStream(Device device) const override {
    return stream(device, streams[device.has_index() ? device.index() : current_index]);
  }
  c10::Stream getDefaultStream(Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return stream(device, ++last_stream); }
  c10::Stream getNewStream(Device device, int) const override { return stream(device, ++last_stream); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto old = getStream(to.device());
    streams[to.device_index()] = to.id();
    return old;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Mark;
    *static_cast<Mark*>(*event) = {std::chrono::steady_clock::now(), stalled};
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override { return !(event && static_cast<Mark*>(event)->late && stalled); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { note_sync("synchronize stream"); }
  void synchronizeEvent(void*) const override { note_sync("synchronize event"); }
  void synchronizeDevice(const DeviceIndex) const override { note_sync("synchronize device"); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Mark*>(to)->when - static_cast<Mark*>(from)->when).count();
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(count()); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// ---- random numbers: a CPU generator of the device's own ----
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index)
      : c10::GeneratorImpl(Device(kSim, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "sim generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "sim generators have no offset"); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  c10::GeneratorImpl* clone_impl() const override {
    auto* twin = new Generator(device_.index());
    twin->host = host.clone();
    return twin;
  }
  at::Generator host;
};
static at::Generator& generator_of(int index) {
  static std::array<at::Generator, kMost> all = [] {
    std::array<at::Generator, kMost> made;
    for (int i = 0; i < kMost; ++i) made[i] = at::make_generator<Generator>(i);
    return made;
  }();
  return all[index < 0 ? current_index : index];
}
at::Generator host_generator(const std::optional<at::Generator>& given, int index) {
  auto chosen = given && given->defined() ? *given : generator_of(index);
  TORCH_CHECK(chosen.device().type() == kSim, "Expected a 'sim' device type for generator but found '", chosen.device().type(), "'");
  return static_cast<Generator*>(chosen.unsafeGetGeneratorImpl())->host;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(count()); }
  void setCurrentDevice(DeviceIndex index) const override { set_current(index); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current_index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    auto old = getCurrentDevice();
    set_current(index);
    return old;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return generator_of(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? static_cast<DeviceIndex>(current_index) : index);
  }
  bool isPinnedPtr(const void* at) const override { return is_pinned(at); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    c10::DeviceGuard guard(storage.device());
    auto room = memory.allocate(size);
    if (const auto both = std::min(size, storage.nbytes())) std::memcpy(room.get(), storage.data(), both);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(room));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
static const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
}  // namespace sim

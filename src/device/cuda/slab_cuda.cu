// Memory by way of the driver, which alone tells addresses and what lies there apart.
#include <utility>

#include "device/cuda/cuda.h"
#include "device/cuda/driver.h"

namespace lockstep::cuda {
namespace {

struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity =
      driver_function<decltype(cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity");
  decltype(&cuMemAddressReserve) reserve =
      driver_function<decltype(cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) free =
      driver_function<decltype(cuMemAddressFree)>("cuMemAddressFree");
  decltype(&cuMemCreate) create = driver_function<decltype(cuMemCreate)>("cuMemCreate");
  decltype(&cuMemRelease) release = driver_function<decltype(cuMemRelease)>("cuMemRelease");
  decltype(&cuMemMap) map = driver_function<decltype(cuMemMap)>("cuMemMap");
  decltype(&cuMemUnmap) unmap = driver_function<decltype(cuMemUnmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) set_access =
      driver_function<decltype(cuMemSetAccess)>("cuMemSetAccess");
};

const Driver& the_driver() {
  static const Driver driver;
  return driver;
}

CUmemLocation place(std::int8_t index) {
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = index;
  return location;
}

CUmemAllocationProp kind(std::int8_t index) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = place(index);
  return properties;
}

CUdeviceptr address(void* data) { return reinterpret_cast<CUdeviceptr>(data); }

}  // namespace

std::int64_t slab_bytes(std::int8_t index, std::int64_t bytes) {
  const OnDevice scope(index);
  const CUmemAllocationProp properties = kind(index);
  std::size_t unit = 0;
  require(the_driver().granularity(&unit, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
          "cuMemGetAllocationGranularity");
  const auto step = static_cast<std::int64_t>(unit);
  return (bytes + step - 1) / step * step;
}

void* reserve_addresses(std::int8_t index, std::int64_t bytes) {
  const OnDevice scope(index);
  CUdeviceptr found = 0;
  require(the_driver().reserve(&found, static_cast<std::size_t>(bytes), 0, 0, 0),
          "cuMemAddressReserve");
  return reinterpret_cast<void*>(found);
}

unsigned long long map(std::int8_t index, void* data, std::int64_t bytes) {
  const OnDevice scope(index);
  const Driver& driver = the_driver();
  const auto size = static_cast<std::size_t>(bytes);
  const CUmemAllocationProp properties = kind(index);
  CUmemGenericAllocationHandle memory = 0;
  const CUresult status = driver.create(&memory, size, &properties, 0);
  if (status == CUDA_ERROR_OUT_OF_MEMORY) return 0;
  require(status, "cuMemCreate");
  CUmemAccessDesc access{};
  access.location = place(index);
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  bool mapped = false;
  try {
    require(driver.map(address(data), size, 0, memory, 0), "cuMemMap");
    mapped = true;
    require(driver.set_access(address(data), size, &access, 1), "cuMemSetAccess");
  } catch (...) {
    if (mapped) driver.unmap(address(data), size);
    driver.release(memory);
    throw;
  }
  return memory;
}

void unmap(std::int8_t index, void* data, std::int64_t bytes, unsigned long long& memory) {
  const OnDevice scope(index);
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  require(the_driver().unmap(address(data), static_cast<std::size_t>(bytes)), "cuMemUnmap");
  require(the_driver().release(std::exchange(memory, 0)), "cuMemRelease");
}

// A device that failed before answers every call with that failure, which was reported where it
// showed: memory goes with the process then.
void drop_addresses(std::int8_t index, void* data, std::int64_t bytes,
                    unsigned long long memory) noexcept {
  int before = 0;
  cudaGetDevice(&before);
  if (before != index) cudaSetDevice(index);
  const auto size = static_cast<std::size_t>(bytes);
  if (memory != 0) {
    cudaDeviceSynchronize();
    the_driver().unmap(address(data), size);
    the_driver().release(memory);
  }
  the_driver().free(address(data), size);
  if (before != index) cudaSetDevice(before);
}

}  // namespace lockstep::cuda

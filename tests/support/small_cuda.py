"""The small engine with one CUDA kernel in it, linked as llama.cpp's CUDA backend is."""

from __future__ import annotations

from tests.support.small_engine import FILES

KERNEL = """\
#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_runtime.h>
template <typename T> static __global__ void add(T *a, const T *b) {
    a[threadIdx.x] += b[threadIdx.x];
}
namespace {
__device__ int counted;
__global__ void count() { counted++; }
}
extern "C" int small_cuda(float *a, const float *b) {
    CUmemAllocationProp prop = {};
    CUmemGenericAllocationHandle memory;
    cublasHandle_t handle;
    add<<<1, 32>>>(a, b);
    count<<<1, 1>>>();
    return cuMemCreate(&memory, 1, &prop, 0) + cublasCreate(&handle);
}
"""

GGML = """\
#ifdef SMALL_CUDA
int small_cuda(float *, const float *);
int ggml_cuda(void) { return small_cuda(0, 0); }
#endif
const char *ggml_where(void) { return __FILE__; }
"""

CUDA_LISTS = """\
option(GGML_CUDA "CUDA" OFF)
if (GGML_CUDA)
  find_package(CUDAToolkit)
  enable_language(CUDA)
  message(STATUS "Using CMAKE_CUDA_ARCHITECTURES=${CMAKE_CUDA_ARCHITECTURES} X=")
  add_library(ggml-cuda SHARED kernel.cu)
  target_link_libraries(ggml-cuda PRIVATE CUDA::cudart CUDA::cublas CUDA::cuda_driver)
  target_link_libraries(ggml PRIVATE ggml-cuda)
  target_compile_definitions(ggml PRIVATE SMALL_CUDA)
  message(STATUS "CUDA host compiler is GNU ${CMAKE_CXX_COMPILER_VERSION}")
  message(STATUS "Including CUDA backend")
endif()
"""

CUDA_FILES = {
    "CMakeLists.txt": FILES["CMakeLists.txt"] + CUDA_LISTS,
    "kernel.cu": KERNEL,
    "ggml.c": GGML,
}
"""What is other than in `FILES`."""

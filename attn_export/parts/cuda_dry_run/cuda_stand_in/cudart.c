/* A CUDA runtime without a device, for dry runs. Memory of the device is memory of the host, copies
   are real, and a launch computes nothing: it records the name of the kernel. */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include "stand_in.h"
#undef cudaGetDeviceProperties
#define OK return cudaSuccess

/* -- the record -------------------------------------------------------------------------------- */

static struct {
  int sm, multiprocessors, shared_per_block, shared_per_multiprocessor;
  size_t memory;
} card = {90, 132, 232448, 233472, 80ull << 30};
static FILE *record;
static size_t in_use;
static unsigned char has_machine_code[1024], has_ptx[1024];

/* Called before anything else: the properties of the card, and the file to write events to. */
void stand_in_configure(int sm, int multiprocessors, int shared_per_block,
                        int shared_per_multiprocessor, size_t memory, const char *path) {
  card.sm = sm;
  card.multiprocessors = multiprocessors;
  card.shared_per_block = shared_per_block;
  card.shared_per_multiprocessor = shared_per_multiprocessor;
  card.memory = memory;
  record = fopen(path, "w");
}

static long long now(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t); /* ONNX Runtime's profiler reads the same clock. */
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

void stand_in_record(const char *kind, size_t bytes, const char *name) {
  long long at = now();
  if (!record) return;
  fprintf(record, "%lld\t%s\t%zu\t%s\n", at, kind, bytes, name);
  fflush(record); /* a process that crashes has said what it did */
  /* The profiler counts in microseconds: two nodes must not share the one of an event. */
  while (now() < at + 2000) {}
}

/* Return the code that kernels of the provider have for an architecture: bit 0 machine code, 1 PTX. */
int stand_in_has_code(int sm) { return has_machine_code[sm & 1023] | has_ptx[sm & 1023] << 1; }

/* -- kernels ----------------------------------------------------------------------------------- */

/* The layout of a "fat binary": a header, then one part for each architecture. */
struct wrapper { uint32_t magic, version; const char *data; void *unused; };
struct fat { uint32_t magic; uint16_t version, header; uint64_t size; };
struct part {
  uint16_t kind, unknown; uint32_t header; uint64_t size;
  uint32_t packed, options; uint16_t minor, major; uint32_t sm;
};

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[4];
  const struct wrapper *w = binary;
  if (w->magic != 0x466243b1) return handle;
  const struct fat *f = (const struct fat *)w->data;
  if (f->magic != 0xba55ed50) return handle;
  const char *at = w->data + f->header, *end = at + f->size;
  while (at + sizeof(struct part) <= end) {
    const struct part *p = (const struct part *)at;
    if (!p->header) break;
    if (p->sm < 1024) (p->kind == 2 ? has_machine_code : has_ptx)[p->sm] = 1;
    at += p->header + p->size;
  }
  return handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}

struct kernel { const void *function; const char *name; };
static struct kernel *kernels; /* a hash table, open addressing: the provider has tens of thousands */
static size_t slots, taken;

static struct kernel *slot_of(const void *function) {
  size_t at = ((uintptr_t)function >> 4) * 0x9E3779B97F4A7C15ull % slots;
  while (kernels[at].function && kernels[at].function != function) at = (at + 1) % slots;
  return &kernels[at];
}
static void grow(void) {
  struct kernel *old = kernels;
  size_t count = slots;
  slots = count ? 2 * count : 1 << 16;
  kernels = calloc(slots, sizeof *kernels);
  for (size_t i = 0; i < count; i++)
    if (old[i].function) *slot_of(old[i].function) = old[i];
  free(old);
}
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name,
                            int limit, void *a, void *b, void *c, void *d, int *e) {
  if (2 * taken >= slots) grow();
  struct kernel *k = slot_of(host);
  taken += !k->function;
  k->function = host;
  k->name = name;
}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external,
                       size_t size, int constant, int global) {}
static cudaError_t launch(const void *function) {
  const char *name = slots ? slot_of(function)->name : 0;
  stand_in_record("launch", 0, name ? name : "?");
  OK;
}
static struct { dim3 grid, block; size_t shared; struct CUstream_st *stream; } pushed;
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t shared, struct CUstream_st *stream) {
  pushed.grid = g, pushed.block = b, pushed.shared = shared, pushed.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *shared, void *stream) {
  *g = pushed.grid, *b = pushed.block, *shared = pushed.shared;
  *(struct CUstream_st **)stream = pushed.stream;
  OK;
}
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; OK; }
cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) {
  return launch((const void *)k);
}
cudaError_t cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, size_t n, cudaStream_t s) {
  return launch(f);
}
cudaError_t cudaLaunchCooperativeKernel(const void *f, dim3 g, dim3 b, void **a, size_t n,
                                        cudaStream_t s) { return launch(f); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **a) {
  return launch(f);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t function, void *user) {
  function(user);
  OK;
}
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a);
  a->maxThreadsPerBlock = 1024, a->numRegs = 64;
  a->binaryVersion = a->ptxVersion = card.sm;
  OK;
}
cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { OK; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t k, enum cudaFuncAttribute a, int v, int d) {
  OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b,
                                                                   size_t s, unsigned flags) {
  *n = 2;
  OK;
}
cudaError_t cudaLibraryLoadData(cudaLibrary_t *l, const void *code, enum cudaJitOption *o,
                                void **ov, unsigned n, enum cudaLibraryOption *lo, void **lv,
                                unsigned ln) { *l = malloc(8); OK; }
cudaError_t cudaLibraryGetKernel(cudaKernel_t *k, cudaLibrary_t l, const char *name) {
  if (2 * taken >= slots) grow();
  *k = malloc(8);
  struct kernel *slot = slot_of(*k);
  taken += !slot->function;
  slot->function = *k, slot->name = strdup(name);
  OK;
}
cudaError_t cudaLibraryUnload(cudaLibrary_t l) { OK; }

/* -- the device -------------------------------------------------------------------------------- */

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr a, int device) {
  switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = card.shared_per_block; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = card.shared_per_multiprocessor; break;
    case cudaDevAttrMultiProcessorCount: *value = card.multiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = card.sm / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = card.sm % 10; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = card.sm == 75 ? 16 : 32; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = card.sm == 75 ? 1024 : 2048; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    default: *value = 0;
  }
  OK;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "No device: dry run");
  p->totalGlobalMem = card.memory;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = card.shared_per_block;
  p->sharedMemPerMultiprocessor = card.shared_per_multiprocessor;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32, p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->major = card.sm / 10, p->minor = card.sm % 10;
  p->multiProcessorCount = card.multiprocessors;
  cudaDeviceGetAttribute(&p->maxThreadsPerMultiProcessor, cudaDevAttrMaxThreadsPerMultiProcessor, 0);
  cudaDeviceGetAttribute(&p->maxBlocksPerMultiProcessor, cudaDevAttrMaxBlocksPerMultiprocessor, 0);
  p->l2CacheSize = 50 << 20;
  p->concurrentKernels = p->cooperativeLaunch = p->memoryPoolsSupported = 1;
  OK;
}
cudaError_t cudaGetDevice(int *d) { *d = 0; OK; }
cudaError_t cudaSetDevice(int d) { OK; }
cudaError_t cudaGetDeviceCount(int *c) { *c = 1; OK; }
cudaError_t cudaDriverGetVersion(int *v) { *v = CUDART_VERSION; OK; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = CUDART_VERSION; OK; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *s, void **f, unsigned v,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *r) {
  *f = NULL;
  if (r) *r = cudaDriverEntryPointSymbolNotFound;
  return cudaErrorSymbolNotFound;
}
const char *cudaGetErrorName(cudaError_t e) { return "error of a dry run"; }
const char *cudaGetErrorString(cudaError_t e) { return "error of a dry run"; }
cudaError_t cudaGetLastError(void) { OK; }
cudaError_t cudaPeekAtLastError(void) { OK; }

/* -- memory ------------------------------------------------------------------------------------ */

#define PAGE 4096 /* its size lies before each allocation */

static cudaError_t allocate(void **p, size_t n, const char *kind) {
  size_t *base = mmap(NULL, n + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  int of_device = kind[0] == 'm';
  if (base == MAP_FAILED) return cudaErrorMemoryAllocation;
  if (of_device && in_use + n > card.memory) {
    munmap(base, n + PAGE);
    return cudaErrorMemoryAllocation;
  }
  base[0] = n;
  if (of_device) in_use += n;
  *p = (char *)base + PAGE;
  stand_in_record(kind, n, "");
  OK;
}
static cudaError_t release(void *p, const char *kind) {
  if (!p) OK;
  size_t *base = (size_t *)((char *)p - PAGE), n = base[0];
  if (kind[0] == 'f') in_use -= n;
  stand_in_record(kind, n, "");
  munmap(base, n + PAGE);
  OK;
}
cudaError_t cudaMalloc(void **p, size_t n) { return allocate(p, n, "malloc"); }
cudaError_t cudaMallocFromPoolAsync(void **p, size_t n, cudaMemPool_t m, cudaStream_t s) {
  return allocate(p, n, "malloc");
}
cudaError_t cudaMallocHost(void **p, size_t n) { return allocate(p, n, "pinned"); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) { return allocate(p, n, "pinned"); }
cudaError_t cudaFree(void *p) { return release(p, "free"); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return release(p, "free"); }
cudaError_t cudaFreeHost(void *p) { return release(p, "unpinned"); }
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) {
  *t = card.memory, *f = card.memory - in_use;
  OK;
}
cudaError_t cudaMemPoolCreate(cudaMemPool_t *p, const struct cudaMemPoolProps *q) {
  *p = malloc(8);
  OK;
}
cudaError_t cudaMemPoolDestroy(cudaMemPool_t p) { OK; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) {
  memset(v, 0, 8);
  OK;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { OK; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t p, size_t n) { OK; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a);
  a->type = cudaMemoryTypeDevice, a->devicePointer = (void *)p;
  OK;
}

/* -- copies ------------------------------------------------------------------------------------ */

static const char *const KINDS[] = {"host", "to device", "to host", "on device", "copy"};

static void copied(enum cudaMemcpyKind kind, size_t n) {
  stand_in_record(KINDS[(unsigned)kind % 5], n, "");
}
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k,
                            cudaStream_t stream) {
  memmove(d, s, n);
  copied(k, n);
  OK;
}
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) {
  cudaMemcpyAsync(d, s, n, k, 0);
  stand_in_record("wait", 0, "cudaMemcpy");
  OK;
}
cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h,
                              enum cudaMemcpyKind k, cudaStream_t stream) {
  for (size_t i = 0; i < h; i++) memmove((char *)d + i * dp, (char *)s + i * sp, w);
  copied(k, w * h);
  OK;
}
cudaError_t cudaMemcpyFromSymbol(void *d, const void *s, size_t n, size_t o,
                                 enum cudaMemcpyKind k) {
  memset(d, 0, n);
  copied(k, n);
  OK;
}
cudaError_t cudaMemset(void *p, int v, size_t n) {
  memset(p, v, n);
  stand_in_record("fill", n, "");
  OK;
}
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) {
  return cudaMemset(p, v, n);
}

/* -- streams, events, graphs ------------------------------------------------------------------- */

static cudaError_t waited(const char *name) {
  stand_in_record("wait", 0, name);
  OK;
}
cudaError_t cudaDeviceSynchronize(void) { return waited("cudaDeviceSynchronize"); }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { return waited("cudaStreamSynchronize"); }
cudaError_t cudaEventSynchronize(cudaEvent_t e) { return waited("cudaEventSynchronize"); }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { OK; }
cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = malloc(8); OK; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { *s = malloc(8); OK; }
cudaError_t cudaStreamDestroy(cudaStream_t s) { free(s); OK; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = malloc(8); OK; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { *e = malloc(8); OK; }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); OK; }
cudaError_t cudaEventElapsedTime(float *m, cudaEvent_t a, cudaEvent_t b) { *m = 1; OK; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { OK; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { OK; }
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) { OK; }
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) { *g = malloc(8); OK; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) {
  *c = cudaStreamCaptureStatusNone;
  OK;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) {
  *e = malloc(8);
  OK;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { OK; }
cudaError_t cudaGraphDestroy(cudaGraph_t g) { free(g); OK; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) { free(g); OK; }

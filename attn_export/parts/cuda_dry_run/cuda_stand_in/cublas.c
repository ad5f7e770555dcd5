/* cuBLAS without a device: a product computes nothing, and is recorded by the function's name. */
#include "stand_in.h"

#define PRODUCT(name) int name() { stand_in_record("library", 0, #name); return 0; }
#define ACCEPTED(name) int name() { return 0; }

int cublasCreate_v2(void **handle) {
  static char made[64];
  *handle = made;
  return 0;
}
int cublasGetMathMode(void *handle, int *mode) {
  *mode = 0;
  return 0;
}
const char *cublasGetStatusName(int status) { return "status of a dry run"; }
const char *cublasGetStatusString(int status) { return "status of a dry run"; }
ACCEPTED(cublasDestroy_v2) ACCEPTED(cublasSetMathMode) ACCEPTED(cublasSetStream_v2)
PRODUCT(cublasSgemm_v2) PRODUCT(cublasDgemm_v2) PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemmBatched) PRODUCT(cublasDgemmBatched) PRODUCT(cublasGemmBatchedEx)
PRODUCT(cublasSgemmStridedBatched) PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasGemmStridedBatchedEx) PRODUCT(cublasSgeam) PRODUCT(cublasDgeam)
PRODUCT(cublasSgetrfBatched) PRODUCT(cublasDgetrfBatched) PRODUCT(cublasSgetriBatched)
PRODUCT(cublasDgetriBatched) PRODUCT(cublasScopy_v2) PRODUCT(cublasSscal_v2)

/* cuBLASLt without a device: a product computes nothing, and is recorded by the function's name. */
#include "stand_in.h"

#define PRODUCT(name) int name() { stand_in_record("library", 0, #name); return 0; }
#define ACCEPTED(name) int name() { return 0; }
#define MADE(name) int name(void **made) { static char object[64]; *made = object; return 0; }

MADE(cublasLtCreate) MADE(cublasLtMatmulDescCreate) MADE(cublasLtMatmulPreferenceCreate)
MADE(cublasLtMatrixLayoutCreate) MADE(cublasLtMatrixTransformDescCreate)
ACCEPTED(cublasLtDestroy) ACCEPTED(cublasLtMatmulDescDestroy)
ACCEPTED(cublasLtMatmulPreferenceDestroy) ACCEPTED(cublasLtMatrixLayoutDestroy)
ACCEPTED(cublasLtMatrixTransformDescDestroy) ACCEPTED(cublasLtMatmulAlgoConfigSetAttribute)
ACCEPTED(cublasLtMatmulAlgoInit) ACCEPTED(cublasLtMatmulDescSetAttribute)
ACCEPTED(cublasLtMatmulPreferenceSetAttribute) ACCEPTED(cublasLtMatrixLayoutSetAttribute)
PRODUCT(cublasLtMatmul) PRODUCT(cublasLtMatrixTransform)

int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, void *results, int *found) {
  *found = 1;
  return 0;
}

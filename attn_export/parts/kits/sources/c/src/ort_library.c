#define _POSIX_C_SOURCE 200112L /* setenv */
#include "ort_library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#if defined(__APPLE__)
static const char *const NAMES[] = {"libonnxruntime.dylib"};
#else
static const char *const NAMES[] = {"libonnxruntime.so.1", "libonnxruntime.so"};
#endif

typedef const OrtApiBase *(*GetBase)(void);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const OrtApiBase *base;
static const OrtApi *api;

const OrtApi *ort(void) { return api; }

const char *ort_version(void) { return base->GetVersionString(); }

static void *open_library(const char *path, Error *error) {
    enum { COUNT = sizeof NAMES / sizeof *NAMES };
    void *library = NULL;
    if (path != NULL) {
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    } else {
        for (size_t i = 0; i < COUNT && library == NULL; i++) {
            library = dlopen(NAMES[i], RTLD_NOW | RTLD_LOCAL);
        }
    }
    if (library == NULL) fail(error, "ONNX Runtime cannot be loaded: %s", dlerror());
    return library;
}

static bool load(const char *path, Error *error) {
    if (base != NULL && path == NULL) return true;
    /* Otherwise ONNX Runtime collects events in the home folder and sends them to its maker. */
    if (base == NULL) setenv("ORT_DISABLE_TELEMETRY", "1", 0);
    void *library = open_library(path, error);
    if (library == NULL) return false;
    void *symbol = dlsym(library, "OrtGetApiBase");
    GetBase get_base;
    memcpy(&get_base, &symbol, sizeof get_base); /* ISO C has no cast to a function */
    const OrtApiBase *found = symbol == NULL ? NULL : get_base();
    if (found == NULL) {
        dlclose(library);
        return fail(error, "%s is not ONNX Runtime", path_end(path != NULL ? path : NAMES[0]));
    }
    if (base != NULL && base != found) {
        return fail(error, "another ONNX Runtime than %s is loaded already", path_end(path));
    }
    const OrtApi *wanted = found->GetApi(ORT_API_VERSION);
    if (wanted == NULL) {
        return fail(error, "ONNX Runtime %s is older than the headers that this was built with",
                    found->GetVersionString());
    }
    base = found;
    api = wanted;
    return true;
}

bool ort_load(const char *path, Error *error) {
    pthread_mutex_lock(&lock);
    bool loaded = load(path, error);
    pthread_mutex_unlock(&lock);
    return loaded;
}

#define _POSIX_C_SOURCE 200809L /* open, fstat */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Opens a regular file. Without O_NONBLOCK, open() of a pipe would wait for a writer. */
static int open_regular(const char *path, size_t *size, Error *error) {
    struct stat found;
    int file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (file < 0) {
        fail(error, "%s: %s", path_end(path), strerror(errno));
        return -1;
    }
    if (fstat(file, &found) != 0 || !S_ISREG(found.st_mode) || found.st_size < 0) {
        close(file);
        fail(error, "%s is not a regular file", path_end(path));
        return -1;
    }
    *size = (uintmax_t)found.st_size > SIZE_MAX ? SIZE_MAX : (size_t)found.st_size;
    return file;
}

bool file_is_regular(const char *path, Error *error) {
    size_t size;
    int file = open_regular(path, &size, error);
    if (file >= 0) close(file);
    return file >= 0;
}

bool file_read(const char *path, size_t most, unsigned char **bytes, size_t *size, Error *error) {
    *bytes = NULL;
    int file = open_regular(path, size, error);
    if (file < 0) return false;
    if (*size > most) {
        close(file);
        return fail(error, "%s has %zu bytes; %zu are the most", path_end(path), *size, most);
    }
    *bytes = malloc(*size + 1);
    size_t held = 0;
    while (*bytes != NULL && held < *size) {
        ssize_t got = read(file, *bytes + held, *size - held);
        if (got <= 0) break;
        held += (size_t)got;
    }
    close(file);
    if (*bytes != NULL && held == *size) return true;
    bool allocated = *bytes != NULL;
    free(*bytes);
    *bytes = NULL;
    return fail(error, allocated ? "%s cannot be read" : "out of memory for %s", path_end(path));
}

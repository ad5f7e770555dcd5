/* Reading of files that others may have written: regular files of limited size only. */
#ifndef FILE_H
#define FILE_H

#include <stddef.h>

#include "error.h"

/* Checks that a path leads to a regular file. Data of pipes and devices may have no end. */
bool file_is_regular(const char *path, Error *error);

/* Reads a whole file of at most `most` bytes into memory that the caller frees. */
bool file_read(const char *path, size_t most, unsigned char **bytes, size_t *size, Error *error);

#endif

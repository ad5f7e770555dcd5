/* Record of the calls of the stand-in libraries, which they share. */
#ifndef STAND_IN_H
#define STAND_IN_H
#include <stddef.h>

/* Write one event: its time, its kind, a number of bytes and a name. Exported by libcudart. */
void stand_in_record(const char *kind, size_t bytes, const char *name);

#endif

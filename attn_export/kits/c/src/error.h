/* Errors are texts of one line; nothing in the library parts of this project ends the program. */
#ifndef ERROR_H
#define ERROR_H

#include <stdbool.h>

typedef struct {
    char text[512];
} Error;

#if defined(__GNUC__)
#define PRINTF_LIKE(text, values) __attribute__((format(printf, text, values)))
#else
#define PRINTF_LIKE(text, values)
#endif

/* Fills in the error and gives false, for `return fail(error, ...)`. */
bool fail(Error *error, const char *format, ...) PRINTF_LIKE(2, 3);

#endif

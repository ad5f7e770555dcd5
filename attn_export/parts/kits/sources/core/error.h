/* Errors of the library parts of this project, as messages of one line. They never exit. */
#ifndef ERROR_H
#define ERROR_H

#include <stdbool.h>
#include <stddef.h>

typedef struct {
    char text[301];
} Error;

#if defined(__GNUC__)
#define PRINTF_LIKE(text, values) __attribute__((format(printf, text, values)))
#else
#define PRINTF_LIKE(text, values)
#endif

/* Sets the message and returns false, for `return fail(error, ...)`. */
bool fail(Error *error, const char *format, ...) PRINTF_LIKE(2, 3);

/* Writes one line to a buffer, without a newline. Control characters, which names in files may
 * contain, become "?". */
void write_line(char *line, size_t size, const char *format, ...) PRINTF_LIKE(3, 4);

bool is_utf8(const char *text);

/* Returns the end of a path, short enough for an error message. */
const char *path_end(const char *path);

#endif

/* Errors are texts of one line; nothing in the library parts of this project ends the program. */
#ifndef ERROR_H
#define ERROR_H

#include <stdbool.h>
#include <stdio.h>

typedef struct {
    char text[301];
} Error;

#if defined(__GNUC__)
#define PRINTF_LIKE(text, values) __attribute__((format(printf, text, values)))
#else
#define PRINTF_LIKE(text, values)
#endif

/* Fills in the error and gives false, for `return fail(error, ...)`. */
bool fail(Error *error, const char *format, ...) PRINTF_LIKE(2, 3);

/* Prints one line. Names come from files: what would move a cursor or colour a screen is a "?". */
void print_line(FILE *to, const char *format, ...) PRINTF_LIKE(2, 3);

/* The end of a path, which says the most about it and fits into an error. */
const char *path_end(const char *path);

#endif

#include "error.h"

#include <stdarg.h>
#include <stdio.h>

bool fail(Error *error, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(error->text, sizeof error->text, format, values);
    va_end(values);
    for (char *c = error->text; *c != '\0'; c++) {
        if (*c == '\n' || *c == '\r') *c = ' ';
    }
    return false;
}

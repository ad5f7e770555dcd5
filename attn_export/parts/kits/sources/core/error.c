#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Returns the number of bytes of a character of UTF-8, or 0 if there is none. */
static size_t character_bytes(const unsigned char *c) {
    if (c[0] < 0x80) return c[0] != 0;
    size_t count = c[0] < 0xc2 || c[0] > 0xf4 ? 0 : c[0] < 0xe0 ? 2 : c[0] < 0xf0 ? 3 : 4;
    for (size_t i = 1; i < count; i++) {
        if (c[i] < 0x80 || c[i] > 0xbf) return 0;
    }
    bool overlong = (c[0] == 0xe0 && c[1] < 0xa0) || (c[0] == 0xf0 && c[1] < 0x90);
    bool no_character = (c[0] == 0xed && c[1] > 0x9f) || (c[0] == 0xf4 && c[1] > 0x8f);
    return overlong || no_character ? 0 : count;
}

/* Returns the number of bytes of a printable character of UTF-8, or 0 if there is none. */
static size_t shown_bytes(const unsigned char *c) {
    bool control = c[0] < 0x20 || c[0] == 0x7f || (c[0] == 0xc2 && c[1] < 0xa0);
    /* General Punctuation has characters that change the direction of text or end a line. */
    bool punctuation = c[0] == 0xe2 && (c[1] == 0x80 || c[1] == 0x81);
    return control || punctuation ? 0 : character_bytes(c);
}

static void make_printable(char *text) {
    for (unsigned char *c = (unsigned char *)text; *c != '\0';) {
        size_t bytes = shown_bytes(c);
        if (bytes == 0) *c = *c == '\n' || *c == '\r' || *c == '\t' ? ' ' : '?';
        c += bytes > 0 ? bytes : 1;
    }
}

bool is_utf8(const char *text) {
    const unsigned char *c = (const unsigned char *)text;
    for (size_t bytes = 1; *c != '\0' && bytes > 0; c += bytes) bytes = character_bytes(c);
    return *c == '\0';
}

bool fail(Error *error, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(error->text, sizeof error->text, format, values);
    va_end(values);
    make_printable(error->text);
    return false;
}

void write_line(char *line, size_t size, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(line, size, format, values);
    va_end(values);
    make_printable(line);
}

const char *path_end(const char *path) {
    enum { SHOWN = 80 };
    size_t length = strlen(path);
    return length > SHOWN ? path + length - SHOWN : path;
}

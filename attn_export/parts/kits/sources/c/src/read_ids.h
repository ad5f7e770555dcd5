/* Token ids in the words of a command line. */
#ifndef READ_IDS_H
#define READ_IDS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

/* Reads ids with commas between them; what is no id is -1. Returns their number. */
static int64_t read_ids(const char *text, int64_t *ids) {
    int64_t count = 0;
    while (*text != '\0') {
        char *end = NULL;
        long long id = strtoll(text, &end, 10);
        bool ends = end != text && (*end == '\0' || (*end == ',' && end[1] != '\0'));
        ids[count++] = ends ? id : -1;
        if (!ends) break;
        text = *end == ',' ? end + 1 : end;
    }
    return count;
}

#endif

/*
 * Calls the functions of attn_export.h in random order, with handles, sizes, types and pointers that
 * are right or wrong. Every call must return a code of the header, with a line where one is due.
 *
 *     fuzz_abi BUNDLE SEED CALLS
 *
 * Prints how often each code came, and on stderr what was wrong: exit code 1.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attn_export.h"

enum { HANDLES = 24, CODES = 11, MOST = 64, ROOM = 1 << 20 };

static uint64_t state;
static attn_handle handles[HANDLES];
static void *memory; /* of every input that is set */
static int64_t counts[CODES];

static uint64_t draw(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static int64_t below(int64_t count) { return (int64_t)(draw() % (uint64_t)count); }

static bool often(void) { return below(8) != 0; }

/* A number that is usually small, and sometimes far from any that is right. */
static int64_t number(int64_t usual) {
    static const int64_t ODD[] = {-1, 0, 1, INT64_MAX, INT64_MIN, INT32_MAX, 1 << 24, 9, -8, 1LL << 40};
    return often() ? below(usual) : ODD[below(sizeof ODD / sizeof *ODD)];
}

static attn_handle *place(void) { return &handles[below(HANDLES)]; }

static attn_handle handle(void) { return often() ? *place() : often() ? draw() % 9999 : draw(); }

/* An array as the bundle describes it, with some tokens; sometimes something in it is wrong. */
static attn_value value_of(attn_handle of, int32_t kind, int64_t index, int64_t batch, int64_t tokens) {
    attn_value value;
    memset(&value, 0, sizeof value);
    attn_describe(of, kind, index, &value);
    if (below(30) == 0) value.rank = (int32_t)number(12);
    value.bytes = value.element_bytes;
    for (int32_t at = 0; at < value.rank && at < ATTN_MAX_RANK; at++) {
        const char *axis = value.axes[at];
        bool of_batch = axis != NULL && strcmp(axis, "batch") == 0;
        if (value.dims[at] < 0) value.dims[at] = of_batch ? batch : tokens;
        if (below(30) == 0) value.dims[at] = number(9);
        if (value.dims[at] < 0 || value.dims[at] > 99 || value.bytes > ROOM) value.bytes = -1;
        value.bytes = value.bytes < 0 ? -1 : value.bytes * value.dims[at];
    }
    /* Wrong sizes are never said to be those of the memory. */
    if (value.bytes > ROOM) value.bytes = 8;
    if (below(30) == 0) value.bytes = number(ROOM);
    if (value.bytes > ROOM) value.bytes = -1;
    if (below(30) == 0) value.dtype = (int32_t)number(20);
    value.data = below(30) == 0 ? NULL : (char *)memory + (below(30) == 0);
    return value;
}

static int set_inputs(attn_handle bundle, attn_handle session) {
    int64_t count = 0, batch = 1 + below(3), tokens = 1 + below(5);
    int code = attn_get(bundle, ATTN_INPUTS, &count);
    for (int64_t i = 0; i < count && code == ATTN_OK; i++) {
        attn_value value = value_of(bundle, ATTN_INPUTS, i, batch, tokens);
        if (below(9) == 0) value.data = NULL, value.bytes = 0; /* the session makes it */
        if (below(30) == 0) value.name = below(2) ? "nothing" : NULL;
        if (value.needed || !often()) code = attn_set_input(session, &value);
    }
    return code;
}

/* Reads or writes an input or output by its name; what an output tells must be there. */
static int use(attn_handle bundle, attn_handle session, const char *path) {
    attn_value told = {.name = "nothing"};
    volatile char sum = 0;
    bool load = below(2);
    attn_describe(bundle, load ? ATTN_INPUTS : ATTN_OUTPUTS, number(4), &told);
    if (load) return attn_load_input(session, told.name, often() ? path : "nowhere.npy", number(9));
    if (!often()) return attn_save_output(session, told.name, path);
    int code = attn_output(session, told.name, often() ? 0 : (int32_t)number(20), often() ? &told : NULL);
    for (int64_t i = 0; code == ATTN_OK && often() && i < told.bytes; i++) sum ^= ((char *)told.data)[i];
    return code;
}

static int encode(attn_handle bundle, attn_handle session) {
    attn_value values[MOST];
    int64_t count = 0, batch = often() ? 1 : 2, tokens = 1 + below(5);
    attn_get(bundle, ATTN_ENCODER_INPUTS, &count);
    if (!often()) count = number(MOST);
    for (int64_t i = 0; i < count && i < MOST; i++) {
        values[i] = value_of(bundle, ATTN_ENCODER_INPUTS, i, batch, tokens);
    }
    return attn_encode(session, often() ? values : NULL, count > MOST ? MOST : count);
}

static int generate(attn_handle session, const int64_t *ids) {
    int64_t length = number(12), token;
    int code = attn_start(session, often() ? ids : NULL, length > MOST ? MOST : length, number(9));
    for (int i = 0; i < 3 && code == ATTN_OK; i++) code = attn_next(often() ? session : handle(), &token);
    return code;
}

static int embed(attn_handle bundle, const int64_t *ids) {
    float vectors[MOST * MOST];
    int64_t width = 0, total = 0, lengths[MOST], texts = often() ? 1 + below(40) : number(MOST);
    attn_get(bundle, ATTN_WIDTH, &width);
    texts = texts > MOST ? MOST : texts;
    for (int i = 0; i < MOST; i++) {
        lengths[i] = below(60) ? 1 + below(12) : number(12);
        total += i < texts && lengths[i] > 0 && lengths[i] < 12 ? lengths[i] : 0;
    }
    return attn_embed(bundle, often() ? ids : NULL, often() ? NULL : ids, often() ? total : number(MOST),
                      often() ? lengths : NULL, texts, often() ? vectors : NULL,
                      often() ? width * texts : number(MOST));
}

static int call(const char *folder, attn_handle bundle, const char *path) {
    int64_t value, numbers[MOST], ids[MOST * 12];
    attn_value told;
    char line[512];
    attn_handle *to = place(), made = 0;
    int code;
    for (int i = 0; i < MOST; i++) numbers[i] = number(12);
    for (int i = 0; i < MOST * 12; i++) ids[i] = below(200) ? below(20) : number(99);
    switch (below(21)) {
        case 0:
            code = attn_open(often() ? ATTN_ABI_VERSION : (uint32_t)draw(), often() ? folder : "", NULL,
                             (int32_t)number(3), 0, &made);
            break;
        case 1: return often() && handle() % 3 ? ATTN_OK : attn_close(handle());
        case 2: return attn_get(handle(), (int32_t)number(20), often() ? &value : NULL);
        case 3: attn_text(handle(), (int32_t)number(3)); return ATTN_OK;
        case 4: return attn_describe(often() ? bundle : handle(), (int32_t)number(9), number(9), often() ? &told : NULL);
        case 5:
            value = often() ? 512 : number(512);
            return attn_test_case(handle(), number(4), often() ? line : NULL, value > 512 ? 512 : value);
        case 6: case 7: code = attn_session(often() ? bundle : handle(), &made); break;
        case 8: case 9: case 10: return set_inputs(bundle, handle());
        case 11: return attn_run(handle());
        case 12: return use(bundle, handle(), path);
        case 13: return attn_prefill(handle(), number(32), often() ? NULL : numbers, number(4));
        case 14: return attn_step(handle());
        case 15: return attn_rewind(handle(), number(4));
        case 16: code = attn_fork(handle(), numbers, often() ? 1 + below(3) : number(MOST), &made); break;
        case 17: return embed(often() ? bundle : handle(), ids);
        case 18: return encode(bundle, handle());
        default: {
            attn_handle one = handle();
            code = often() ? encode(bundle, one) : ATTN_OK;
            return often() ? generate(one, ids) : code;
        }
    }
    if (code == ATTN_OK) {
        attn_close(*to);
        *to = made;
    }
    return code;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    char path[512];
    snprintf(path, sizeof path, "%s.npy", argv[0]);
    state = strtoull(argv[2], NULL, 10) * 2654435769u + 88172645463325252u;
    memory = calloc(1, ROOM + 8);
    for (int i = 0; memory != NULL && i < ROOM; i += 8) ((char *)memory)[i] = (char)below(2);
    attn_handle bundle = 0;
    if (memory == NULL || attn_open(ATTN_ABI_VERSION, argv[1], NULL, 1, 0, &bundle) != ATTN_OK) return 2;
    for (long i = strtol(argv[3], NULL, 10); i > 0; i--) {
        int code = call(argv[1], bundle, path);
        if (code < 0 || code >= CODES) {
            fprintf(stderr, "a call gave %d\n", code);
            return 1;
        }
        counts[code]++;
        const char *line = attn_last_error();
        if (code > ATTN_END && (line[0] == '\0' || strchr(line, '\n') != NULL)) {
            fprintf(stderr, "code %d without a line: %s\n", code, line);
            return 1;
        }
    }
    for (int i = 0; i < HANDLES; i++) attn_close(handles[i]);
    attn_close(bundle);
    free(memory);
    for (int code = 0; code < CODES; code++) printf("%d:%lld ", code, (long long)counts[code]);
    printf("\n");
    return 0;
}

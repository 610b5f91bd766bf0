/* Handles: numbers that stand for objects.
 *
 * A number is never used again, so a destroyed handle is told from one that never was, and no
 * wrong number is ever followed as an address.
 */

#include <stdlib.h>

#include "fake.h"

#define FIRST_HANDLE 0x7a0000000000ull
#define STEP 16

struct place {
    enum kind kind;
    void *object; /* NULL once dropped */
};

static struct place *places;
static u64 num_places, num_allotted;
static long num_live[NUM_KINDS];
static const char *const NAMES[NUM_KINDS] = {
    "context", "stream", "event", "module", "graph", "executable graph", "function", "graph node",
};

handle_t add_handle(enum kind kind, void *object)
{
    if (num_places == num_allotted) {
        num_allotted = num_allotted == 0 ? 256 : 2 * num_allotted;
        places = realloc(places, num_allotted * sizeof *places);
        if (places == NULL) abort();
    }
    places[num_places] = (struct place){kind, object};
    ++num_live[kind];
    return FIRST_HANDLE + STEP * num_places++;
}

static struct place *place_of(handle_t handle)
{
    const u64 offset = handle - FIRST_HANDLE;
    if (handle < FIRST_HANDLE || offset % STEP != 0 || offset / STEP >= num_places) return NULL;
    return &places[offset / STEP];
}

void *find_object(handle_t handle, enum kind kind)
{
    const struct place *place = place_of(handle);
    return place != NULL && place->kind == kind ? place->object : NULL;
}

void *object_of(handle_t handle, enum kind kind)
{
    const struct place *place = place_of(handle);
    if (place == NULL) {
        violation("0x%llx is no %s", (unsigned long long)handle, NAMES[kind]);
        return NULL;
    }
    if (place->kind != kind) {
        violation("a handle of the wrong kind: %s, not %s", NAMES[place->kind], NAMES[kind]);
        return NULL;
    }
    if (place->object == NULL) violation("the %s was destroyed before", NAMES[kind]);
    return place->object;
}

void drop_handle(handle_t handle)
{
    struct place *place = place_of(handle);
    if (place != NULL && place->object != NULL) {
        place->object = NULL;
        --num_live[place->kind];
    }
}

void each_object(enum kind kind, void (*visit)(void *object, void *argument), void *argument)
{
    for (u64 i = 0; i < num_places; ++i) {
        if (places[i].kind == kind && places[i].object != NULL) visit(places[i].object, argument);
    }
}

long live_handles(enum kind kind) { return num_live[kind]; }

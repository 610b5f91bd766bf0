/* Stand-ins for kernels: those that Python registers, and a few of our own. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

static struct kernel *registered;
static struct kernel *counted; /* one for each name that ran, whether it has a stand-in or not */

int fake_is_range_usable(u64 address, size_t nbytes);

static u32 width(char letter)
{
    switch (letter) {
    case 'Q':
    case 'q':
    case 'd':
        return 8;
    case 'I':
    case 'i':
    case 'f':
        return 4;
    case 'H':
    case 'h':
    case 'e':
        return 2;
    case 'B':
    case 'b':
        return 1;
    default:
        return 0;
    }
}

static u32 *words(void *param, size_t count)
{
    u64 address;
    memcpy(&address, param, sizeof address);
    return fake_is_range_usable(address, 4 * count) ? (u32 *)address : NULL;
}

/* fake_increment(u32 *target) */
static int increment(void **params, const u32 *grid, const u32 *block, u32 shared_nbytes)
{
    (void)grid, (void)block, (void)shared_nbytes;
    u32 *target = words(params[0], 1);
    if (target == NULL) return ILLEGAL_ADDRESS;
    ++*target;
    return OK;
}

/* fake_add(u32 *target, u32 value) */
static int add(void **params, const u32 *grid, const u32 *block, u32 shared_nbytes)
{
    (void)grid, (void)block, (void)shared_nbytes;
    u32 *target = words(params[0], 1);
    if (target == NULL) return ILLEGAL_ADDRESS;
    *target += *(const u32 *)params[1];
    return OK;
}

/* fake_count(u32 *target): adds the number of threads */
static int count(void **params, const u32 *grid, const u32 *block, u32 shared_nbytes)
{
    (void)shared_nbytes;
    u32 *target = words(params[0], 1);
    if (target == NULL) return ILLEGAL_ADDRESS;
    *target += grid[0] * grid[1] * grid[2] * block[0] * block[1] * block[2];
    return OK;
}

/* fake_spin(u64 num_cycles): on a device it takes time; here lazy work does that */
static int spin(void **params, const u32 *grid, const u32 *block, u32 shared_nbytes)
{
    (void)params, (void)grid, (void)block, (void)shared_nbytes;
    return OK;
}

/* fake_fault(i32 code) */
static int fault(void **params, const u32 *grid, const u32 *block, u32 shared_nbytes)
{
    (void)grid, (void)block, (void)shared_nbytes;
    return *(const int *)params[0];
}

static struct kernel built_in[] = {
    {.name = "fake_increment", .num_params = 1, .params = {{0, 8}}, .run = increment},
    {.name = "fake_add", .num_params = 2, .params = {{0, 8}, {8, 4}}, .run = add},
    {.name = "fake_count", .num_params = 1, .params = {{0, 8}}, .run = count},
    {.name = "fake_spin", .num_params = 1, .params = {{0, 8}}, .run = spin},
    {.name = "fake_fault", .num_params = 1, .params = {{0, 4}}, .run = fault},
};

static struct kernel *find_in(struct kernel *list, const char *name)
{
    while (list != NULL && strcmp(list->name, name) != 0) list = list->next;
    return list;
}

struct kernel *find_kernel(const char *name)
{
    struct kernel *kernel = find_in(registered, name);
    for (size_t i = 0; kernel == NULL && i < sizeof built_in / sizeof *built_in; ++i) {
        if (strcmp(built_in[i].name, name) == 0) kernel = &built_in[i];
    }
    return kernel;
}

static struct kernel *add_to(struct kernel **list, const char *name)
{
    struct kernel *kernel = calloc(1, sizeof *kernel);
    snprintf(kernel->name, sizeof kernel->name, "%s", name);
    kernel->next = *list;
    *list = kernel;
    return kernel;
}

void count_run(const char *name)
{
    struct kernel *kernel = find_in(counted, name);
    if (kernel == NULL) kernel = add_to(&counted, name);
    ++kernel->num_runs;
}

static bool read_format(const char *format, struct param *params)
{
    u32 offset = 0;
    for (u32 i = 0; format[i] != '\0'; ++i) {
        const u32 nbytes = width(format[i]);
        if (nbytes == 0) return false;
        offset = (offset + nbytes - 1) / nbytes * nbytes;
        params[i] = (struct param){offset, nbytes};
        offset += nbytes;
    }
    return true;
}

/* The format has a letter for each parameter, as Python's struct has them. Return whether it is
 * one; a later registration of the same name replaces the earlier. */
API int fake_register_kernel(const char *name, const char *format, stand_in run)
{
    struct param params[MAX_PARAMS] = {{0, 0}};
    if (strlen(format) > MAX_PARAMS || strlen(name) >= sizeof registered->name) return 0;
    if (!read_format(format, params)) return 0;
    take_lock();
    struct kernel *kernel = find_in(registered, name);
    if (kernel == NULL) kernel = add_to(&registered, name);
    kernel->num_params = (u32)strlen(format);
    memcpy(kernel->params, params, sizeof params);
    kernel->run = run;
    drop_lock();
    return 1;
}

static void forget(struct kernel **list)
{
    while (*list != NULL) {
        struct kernel *next = (*list)->next;
        free(*list);
        *list = next;
    }
}

API void fake_forget_kernels(void)
{
    take_lock();
    forget(&registered);
    drop_lock();
}

API void fake_clear_runs(void)
{
    take_lock();
    forget(&counted);
    drop_lock();
}

API long fake_num_runs(const char *name)
{
    take_lock();
    const struct kernel *kernel = find_in(counted, name);
    const long num_runs = kernel == NULL ? 0 : kernel->num_runs;
    drop_lock();
    return num_runs;
}

/* What a cubin says about itself. */
#ifndef CUBIN_H
#define CUBIN_H

#include "fake.h"

u64 cubin_nbytes(const char *image); /* 0: damaged */
int cubin_arch(const char *image);   /* such as 90 */
bool cubin_has_kernel(const char *image, u64 nbytes, const char *name);
/* Read each parameter's place, in kernel order; return how many there are. */
u32 cubin_params(const char *image, u64 nbytes, const char *name, struct param *params);

#endif

/* The table of functions. */
#ifndef SYMBOLS_H
#define SYMBOLS_H

#include "fake.h"

typedef void (*symbol)(void);

symbol find_symbol(const char *name, int version); /* NULL when this driver lacks it */

#endif

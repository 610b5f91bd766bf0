/* Reading a cubin: an ELF file with a section of code and one of notes for each kernel.
 *
 * The layout of the notes is what NVRTC 13.0 was seen to write; parameters are notes of kind 0x17.
 */

#include <string.h>

#include "cubin.h"

#define CUDA_MACHINE 190
#define SECTION_NBYTES 64
#define SEGMENT_NBYTES 56
#define NO_BITS 8
#define MAX_IMAGE_NBYTES (1ull << 30)
#define NEW_ABI 8
#define SIZED_NOTE 4
#define PARAMETER_NOTE 0x17
#define PARAMETER_NBYTES 12

struct section {
    const char *name;
    const char *bytes;
    u64 nbytes;
};

static u64 field(const char *bytes, size_t offset, size_t width)
{
    u64 value = 0;
    memcpy(&value, bytes + offset, width);
    return value;
}

static u64 larger(u64 a, u64 b) { return a > b ? a : b; }

static const char *section_header(const char *image, u64 index)
{
    return image + field(image, 40, 8) + index * SECTION_NBYTES;
}

static u64 num_sections(const char *image) { return field(image, 60, 2); }

/* The driver is given no length; the headers say how far the image reaches. */
u64 cubin_nbytes(const char *image)
{
    if (field(image, 18, 2) != CUDA_MACHINE || field(image, 58, 2) != SECTION_NBYTES) return 0;
    u64 end = larger(field(image, 40, 8) + num_sections(image) * SECTION_NBYTES,
                     field(image, 32, 8) + field(image, 56, 2) * SEGMENT_NBYTES);
    for (u64 i = 0; end <= MAX_IMAGE_NBYTES && i < num_sections(image); ++i) {
        const char *header = section_header(image, i);
        const bool has_bytes = field(header, 4, 4) != NO_BITS;
        if (has_bytes) end = larger(end, field(header, 24, 8) + field(header, 32, 8));
    }
    return end > MAX_IMAGE_NBYTES ? 0 : end;
}

int cubin_arch(const char *image)
{
    const u64 flags = field(image, 48, 4);
    return image[8] >= NEW_ABI ? (int)(flags >> 8 & 0xff) : (int)(flags & 0xff);
}

static bool read_section(const char *image, u64 nbytes, u64 index, struct section *section)
{
    const char *header = section_header(image, index);
    const char *names = section_header(image, field(image, 62, 2));
    const u64 name_at = field(names, 24, 8) + field(header, 0, 4);
    const u64 offset = field(header, 24, 8);
    section->nbytes = field(header, 4, 4) == NO_BITS ? 0 : field(header, 32, 8);
    if (name_at >= nbytes || offset > nbytes || section->nbytes > nbytes - offset) return false;
    section->name = image + name_at;
    section->bytes = image + offset;
    return true;
}

static bool find_section(const char *image, u64 nbytes, const char *prefix, const char *name,
                         struct section *section)
{
    const size_t length = strlen(prefix);
    for (u64 i = 0; i < num_sections(image); ++i) {
        if (!read_section(image, nbytes, i, section)) continue;
        if (strncmp(section->name, prefix, length) != 0) continue;
        if (strcmp(section->name + length, name) == 0) return true;
    }
    return false;
}

bool cubin_has_kernel(const char *image, u64 nbytes, const char *name)
{
    struct section section;
    return find_section(image, nbytes, ".text.", name, &section);
}

static u32 read_parameter(const char *note, struct param *params)
{
    const u32 index = (u32)field(note, 4, 2);
    if (index >= MAX_PARAMS) return 0;
    params[index].offset = (u32)field(note, 6, 2);
    params[index].nbytes = (u32)(field(note, 8, 4) >> 18);
    return index + 1;
}

u32 cubin_params(const char *image, u64 nbytes, const char *name, struct param *params)
{
    struct section section;
    u32 count = 0;
    if (!find_section(image, nbytes, ".nv.info.", name, &section)) return 0;
    for (u64 at = 0; at + 4 <= section.nbytes;) {
        const char *note = section.bytes + at;
        const u64 size = note[0] == SIZED_NOTE ? field(note, 2, 2) : 0;
        at += 4 + size;
        if (note[1] != PARAMETER_NOTE || size < PARAMETER_NBYTES || at > section.nbytes) continue;
        const u32 seen = read_parameter(note + 4, params);
        if (seen > count) count = seen;
    }
    return count;
}

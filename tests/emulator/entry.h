// What Python calls to launch a kernel: after the kernel's source, one EMULATED_ENTRY for each.
#pragma once

#include <string>
#include <type_traits>
#include <utility>

namespace emulated {

inline thread_local std::string failure_text;

template <class... P, size_t... I>
void call(void (*kernel)(P...), void **params, std::index_sequence<I...>) {
    kernel(*static_cast<P *>(params[I])...);
}

template <class... P>
void call(void (*kernel)(P...), void **params) {
    call(kernel, params, std::index_sequence_for<P...>());
}

template <class P>
constexpr char letter() {
    if constexpr (std::is_pointer_v<P>) return 'P';
    if constexpr (std::is_floating_point_v<P>) return sizeof(P) == 4 ? 'f' : 'd';
    constexpr char LETTERS[] = {0, 'B', 'H', 0, 'I', 0, 0, 0, 'Q'};
    return LETTERS[sizeof(P)];
}

template <class... P>
const char *letters(void (*)(P...)) {
    static const char text[] = {letter<P>()..., '\0'};
    return text;
}

inline int finish(const char *failure) {
    if (failure == nullptr) return 0;
    failure_text = failure;
    return 719;
}

}  // namespace emulated

#define EMULATED_API extern "C" __attribute__((visibility("default")))

EMULATED_API const char *emulated_failure() { return emulated::failure_text.c_str(); }

#define EMULATED_ENTRY(name)                                                                     \
    EMULATED_API const char *emulated_letters_##name() { return emulated::letters(&name); }      \
    EMULATED_API int emulated_##name(void **params, const unsigned *grid, const unsigned *block, \
                                     unsigned shared_nbytes, unsigned order) {                   \
        return emulated::finish(emulated::launch(                                                \
            [](void **values) { emulated::call(&name, values); }, params,                        \
            {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, shared_nbytes, order)); \
    }

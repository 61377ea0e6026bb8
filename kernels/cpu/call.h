// The calling convention between Python and kernels. A kernel gets one array of its arguments, eight bytes each, so a
// call is bytes that can be stored and repeated (`replay.cpp`). The array's format is exported, so that Python packs
// what C++ takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace call {

union Argument {
    int64_t integer;  // or a pointer
    double number;
};

template <class T>
inline T as(Argument argument) {
    if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(argument.integer);
    else if constexpr (std::is_floating_point_v<T>) return T(argument.number);
    else return T(argument.integer);
}

template <class... A, size_t... I>
inline void apply(void (*function)(A...), const Argument* arguments, std::index_sequence<I...>) {
    function(as<A>(arguments[I])...);
}

template <class... A>
inline void apply(void (*function)(A...), const Argument* arguments) {
    apply(function, arguments, std::index_sequence_for<A...>());
}

// The codes of Python's `struct`: q for an integer or a pointer, d for a number.
template <size_t N>
struct Format {
    char text[N + 2];
};

template <class... A>
constexpr Format<sizeof...(A)> format_of(void (*)(A...)) {
    return {{'=', (std::is_floating_point_v<A> ? 'd' : 'q')..., '\0'}};
}

}  // namespace call

// Exports `name`, a function of pointers, integers and numbers that returns nothing, as `inferd_name`.
#define INFERD_EXPORT(name)                                                                      \
    extern "C" {                                                                                 \
    void inferd_##name(const call::Argument* arguments) { call::apply(name, arguments); }        \
    call::Format<sizeof(call::format_of(name)) - 2> inferd_##name##_format = call::format_of(name); \
    }

// A stand-in for SHMEM's device headers, to compile the shim on a host: every function writes down how it was called.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstring>

#define __aicore__
#define __gm__

inline char *record()
{
    static char text[1 << 16];
    return text;
}

template <typename... T> void recorded(const char *format, T... values)
{
    size_t used = strlen(record());
    snprintf(record() + used, (1 << 16) - used, format, values...);
}

inline void aclshmem_putmem_nbi(void *dst, void *src, uint32_t size, int32_t pe)
{
    recorded("put %ld %ld %u %d\n", (long)dst, (long)src, size, pe);
}

inline void aclshmem_getmem_nbi(void *dst, void *src, uint32_t size, int32_t pe)
{
    recorded("get %ld %ld %u %d\n", (long)dst, (long)src, size, pe);
}

inline void aclshmem_putmem_signal_nbi(void *dst, void *src, size_t size, int32_t *sig, int32_t signal, int op, int pe)
{
    recorded("put_signal %ld %ld %zu %ld %d %d %d\n", (long)dst, (long)src, size, (long)sig, signal, op, pe);
}

inline void aclshmemx_signal_op(int32_t *sig, int32_t signal, int op, int pe)
{
    recorded("signal %ld %d %d %d\n", (long)sig, signal, op, pe);
}

inline void aclshmem_quiet() { recorded("quiet\n"); }
inline void aclshmem_fence() { recorded("fence\n"); }

extern "C" __attribute__((used)) inline const char *calls() { return record(); }
extern "C" __attribute__((used)) inline void reset() { record()[0] = 0; }

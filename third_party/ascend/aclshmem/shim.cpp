// What the calls of words.py end in: aclshmem's device functions, with arguments that need no memref descriptors.
// An address comes as an int64. The compiler calls _mlir_ciface_<symbol> from a vector kernel.
//
// Built by build.sh with CANN's compiler. Tested on a host with stand-ins for aclshmem's headers; NOT built with CANN,
// linked or run on an NPU yet.

#include <cstdint>

#include "device/gm2gm/shmem_device_mo.h"
#include "device/gm2gm/shmem_device_p2p_sync.h"
#include "device/gm2gm/shmem_device_rma.h"
#include "device/gm2gm/shmem_device_so.h"

#define TDIST_CALL extern "C" __aicore__ __attribute__((used)) void

namespace {
// aclshmem takes a uint32 number of bytes. A multiple of every line and page that it might care about.
constexpr int64_t kPiece = int64_t(1) << 30;
constexpr int kSignalSet = 0;  // ACLSHMEM_SIGNAL_SET: an addition does not cross RDMA

inline __aicore__ __gm__ void *at(int64_t address) { return reinterpret_cast<__gm__ void *>(address); }
}  // namespace

TDIST_CALL _mlir_ciface_aclshmem_tdist_put_nbi(int64_t dst, int64_t src, int64_t nbytes, int32_t pe)
{
    for (; nbytes > 0; nbytes -= kPiece, dst += kPiece, src += kPiece) {
        aclshmem_putmem_nbi(at(dst), at(src), static_cast<uint32_t>(nbytes < kPiece ? nbytes : kPiece), pe);
    }
}

TDIST_CALL _mlir_ciface_aclshmem_tdist_get_nbi(int64_t dst, int64_t src, int64_t nbytes, int32_t pe)
{
    for (; nbytes > 0; nbytes -= kPiece, dst += kPiece, src += kPiece) {
        aclshmem_getmem_nbi(at(dst), at(src), static_cast<uint32_t>(nbytes < kPiece ? nbytes : kPiece), pe);
    }
}

// Pieces but the last go ahead and are waited for: the signal may be seen only after all of them.
TDIST_CALL _mlir_ciface_aclshmem_tdist_put_signal_nbi(int64_t dst, int64_t src, int64_t nbytes, int64_t sig, int32_t value,
                                                      int32_t pe)
{
    if (nbytes > kPiece) {
        int64_t ahead = (nbytes - 1) / kPiece * kPiece;
        _mlir_ciface_aclshmem_tdist_put_nbi(dst, src, ahead, pe);
        aclshmem_quiet();
        dst += ahead;
        src += ahead;
        nbytes -= ahead;
    }
    if (nbytes <= 0) {  // what a put of no bytes does is not documented
        aclshmem_fence();
        aclshmemx_signal_op(reinterpret_cast<__gm__ int32_t *>(sig), value, kSignalSet, pe);
        return;
    }
    aclshmem_putmem_signal_nbi(at(dst), at(src), static_cast<uint32_t>(nbytes), reinterpret_cast<__gm__ int32_t *>(sig),
                               value, kSignalSet, pe);
}

TDIST_CALL _mlir_ciface_aclshmem_tdist_quiet(int32_t) { aclshmem_quiet(); }

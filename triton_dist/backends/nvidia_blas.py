"""cuBLASLt's matrix product with what torch does not offer: onto another matrix, out = c + a @ b, where torch's addmm first
copies c to out; on a part of the multiprocessors.

The library is the one that torch has loaded. Products use no workspace, so what is recorded in a graph depends on no memory
but its operands'. Names and numbers are those of cublasLt.h and library_types.h of CUDA 12 and 13.
"""

import ctypes
import functools

import torch

from ..errors import BackendError

COMPUTE_32F, R_32F = 68, 0
TYPES = {torch.float16: 2, torch.bfloat16: 14}
TRANSA, TRANSB, SM_COUNT_TARGET = 3, 4, 15  # cublasLtMatmulDescAttributes_t
ALIGNMENTS = 5, 6, 7, 8  # cublasLtMatmulPreferenceAttributes_t: least alignment of A, B, C, D in bytes


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@functools.cache
def _library():
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    library = ctypes.CDLL(name)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    for call, *arguments in (
        ("MatmulDescCreate", pointer, number, number),
        ("MatmulDescSetAttribute", pointer, number, pointer, ctypes.c_size_t),
        ("MatrixLayoutCreate", pointer, number, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
        ("MatmulPreferenceCreate", pointer),
        ("MatmulPreferenceSetAttribute", pointer, number, pointer, ctypes.c_size_t),
        ("MatmulAlgoGetHeuristic", *[pointer] * 7, number, pointer, pointer),
        ("Matmul", *[pointer] * 14, ctypes.c_size_t, pointer),
    ):
        getattr(library, f"cublasLt{call}").argtypes = arguments
    return library


def _call(name, *arguments):
    status = getattr(_library(), f"cublasLt{name}")(*arguments)
    if status:
        raise BackendError(f"cublasLt{name} failed: status {status}")


@functools.cache
def _handle(device):
    with torch.cuda.device(device):
        handle = ctypes.c_void_p()
        _call("Create", ctypes.byref(handle))
        return handle


def _made(kind, *arguments):
    made = ctypes.c_void_p()
    _call(kind, ctypes.byref(made), *arguments)
    return made


def _set(kind, made, attribute, value):
    word = ctypes.c_uint32(value)
    _call(f"{kind}SetAttribute", made, attribute, ctypes.byref(word), 4)


def _stored(tensor):
    """(how it lies: False row by row, True column by column, elements between two of them); None when it does neither."""
    rows, columns = tensor.shape
    if tensor.stride(1) == 1 and tensor.stride(0) >= columns:
        return False, tensor.stride(0)
    if tensor.stride(0) == 1 and tensor.stride(1) >= rows:
        return True, tensor.stride(1)
    return None


def _alignment(tensor):
    return min(tensor.data_ptr() & -tensor.data_ptr(), 256)


@functools.cache
def _plan(device, dtype, M, N, K, stored, alignments, multiprocessors):
    """(description, layouts of b, a, c, out, algorithm) or None. The library's matrices lie column by column, so it multiplies
    the transposed ones."""
    (a_turned, a_ld), (b_turned, b_ld), (_, c_ld), (_, out_ld) = stored
    kind = TYPES[dtype]
    description = _made("MatmulDescCreate", COMPUTE_32F, R_32F)
    _set("MatmulDesc", description, TRANSA, b_turned)
    _set("MatmulDesc", description, TRANSB, a_turned)
    if multiprocessors:
        _set("MatmulDesc", description, SM_COUNT_TARGET, multiprocessors)
    layouts = [
        _made("MatrixLayoutCreate", kind, *((K, N) if b_turned else (N, K)), b_ld),
        _made("MatrixLayoutCreate", kind, *((M, K) if a_turned else (K, M)), a_ld),
        _made("MatrixLayoutCreate", kind, N, M, c_ld),
        _made("MatrixLayoutCreate", kind, N, M, out_ld),
    ]
    preference = _made("MatmulPreferenceCreate")  # no workspace, unless asked for
    for attribute, alignment in zip(ALIGNMENTS, alignments):
        _set("MatmulPreference", preference, attribute, alignment)
    found, count = _Heuristic(), ctypes.c_int()
    results = 1, ctypes.byref(found), ctypes.byref(count)
    _call("MatmulAlgoGetHeuristic", _handle(device), description, *layouts, preference, *results)
    return (description, layouts, found) if count.value else None


def product(a, b, out, c=None, multiprocessors=0):
    """out = a @ b, or c + a @ b, in fp32, rounded once, in the order of the current stream. False, and nothing done, when the
    library does not take such operands: 16-bit dtypes, rows of c and out contiguous, a and b either way, nothing empty.
    multiprocessors: so many it may use; 0: all."""
    tensors = b, a, (out if c is None else c), out
    stored = tuple(map(_stored, (a, b, *tensors[2:])))
    M, N = out.shape
    if out.dtype not in TYPES or not min(M, N, a.shape[1]) or None in stored or stored[2][0] or stored[3][0]:
        return False
    alignments = tuple(map(_alignment, tensors))
    plan = _plan(out.device.index, out.dtype, M, N, a.shape[1], stored, alignments, multiprocessors)
    if plan is None:
        return False
    description, layouts, found = plan
    one, beta = (ctypes.byref(ctypes.c_float(factor)) for factor in (1, c is not None))
    B, A, C, D = zip((tensor.data_ptr() for tensor in tensors), layouts)
    stream = torch.cuda.current_stream(out.device).cuda_stream
    algo = ctypes.byref(found.algo)
    _call("Matmul", _handle(out.device.index), description, one, *B, *A, beta, *C, *D, algo, None, 0, stream)
    return True

#!/usr/bin/env bash
# Builds the shim with CANN's compiler: bash build.sh OUT.bc [aicore architecture]
#
# Needs a CANN whose set_env.sh was sourced, and SHMEM's headers: SHMEM_HOME_PATH (its set_env.sh sets it) or the include
# folder of its source tree in SHMEM_INCLUDE. NOT run yet: written from the command that AscendNPU-IR's own tests use.
set -euo pipefail
out=${1:?usage: bash build.sh OUT.bc [dav-c220-vec]}
arch=${2:-dav-c220-vec} # Ascend 910B and 910_93
here=$(cd "$(dirname "$0")" && pwd)
: "${ASCEND_HOME_PATH:?source set_env.sh of CANN first}"
headers=${SHMEM_INCLUDE:-${SHMEM_HOME_PATH:+$SHMEM_HOME_PATH/shmem/include}}
[ -f "$headers/shmem.h" ] || { echo "no shmem.h in '${headers:-}': set SHMEM_INCLUDE to SHMEM's include folder" >&2; exit 1; }
compiler=$(command -v ccec || command -v "$ASCEND_HOME_PATH/compiler/ccec_compiler/bin/ccec") ||
    { echo "no ccec on PATH: it comes with CANN's toolkit" >&2; exit 1; }
kernel_headers=$(find "$ASCEND_HOME_PATH/" -name kernel_operator.h -printf '%h\n' -quit)
[ -n "$kernel_headers" ] || { echo "no kernel_operator.h below $ASCEND_HOME_PATH: install CANN's toolkit" >&2; exit 1; }
"$compiler" -x cce --cce-aicore-arch="$arch" --cce-aicore-only -std=c++17 -O2 -c -emit-llvm \
    -I"$headers" -I"$headers/../src" -I"$headers/../src/device" \
    -I"$kernel_headers" -I"$kernel_headers/.." -I"$kernel_headers/../impl" -I"$kernel_headers/../interface" \
    "$here/shim.cpp" -o "$out"
echo "export TRITON_DIST_ACLSHMEM_BITCODE=$(realpath "$out")"

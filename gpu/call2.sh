export TRITON_DIST_CACHE_DIR=$OUT/cache TRITON_DIST_WAIT_TIMEOUT=15
run() { timeout $1 python3 -m torch.distributed.run --standalone --nproc-per-node=2 -m triton_dist.tune "${@:2}" --output $OUT/table.json 2>&1 | grep -v 'OMP_NUM\|^\*\*\*\|^W[0-9]'; date +%T; }
date +%T
run 30 gemm_reduce_scatter gemm_allreduce --shapes 1024,4096,2048 2,4096,4096 128,4096,4096 512,512,4096 8192,4096,2048
run 18 all_reduce all_gather --shapes 65536 4194304
timeout 30 python3 -m pytest -q -x python/triton_dist/test/tuning/test_autotune.py -k "launched_by_nobody or fresh_signals or slowest" 2>&1 | tail -30
run 15 allgather_gemm --shapes 64,4096,4096 1024,8192,8192

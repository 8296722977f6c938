export TRITON_DIST_CACHE_DIR=$OUT/cache TRITON_CACHE_DIR=/tmp/tune_triton_cache PYTHONUNBUFFERED=1
( timeout -k 5 120 python3 -u -m pytest -q -x python/triton_dist/test/tuning/test_autotune.py python/triton_dist/test/tuning/test_choice.py > $OUT/pytest.log 2>&1; date +%T >> $OUT/pytest.log ) &
date +%T
timeout -k 5 165 python3 -u -m torch.distributed.run --nproc-per-node=2 --master-port=29711 -m triton_dist.tune gemm_reduce_scatter all_reduce allgather_gemm gemm_allreduce all_gather reduce_scatter moe_dispatch moe_combine --output $OUT/table.json 2>&1 | grep --line-buffered -v 'OMP_NUM\|\*\*\*\|return func' | while IFS= read -r line; do echo "$(date +%M:%S) $line"; done
date +%T
wait
tail -40 $OUT/pytest.log

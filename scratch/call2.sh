export TRITON_CACHE_DIR=/tmp/robust_cache
T="python3 -m torch.distributed.run --nproc-per-node=2"
timeout 50 python3 benchmarks/sanitize.py --seconds 38 --log $OUT/memcheck.log > $OUT/memcheck.txt 2>&1; tail -26 $OUT/memcheck.txt; echo "== memcheck $SECONDS s"
timeout 30 python3 -m pytest -q --no-header -p no:cacheprovider -k "flags or busy" python/triton_dist/test/shmem/test_kernel_waits_two_gpus.py 2>&1 | tail -25; echo "== waits $SECONDS s"
for i in 1; do
timeout 20 $T --master-port 29821 scratch/cost.py 2>&1 | grep "^o\|rror"
TRITON_DIST_WAIT_TIMEOUT=10 timeout 20 $T --master-port 29822 scratch/cost.py 2>&1 | grep "^o\|rror"
done; echo "== cost $SECONDS s"
TRITON_DIST_NVIDIA_HEAP=nvshmem timeout 60 python3 -m pytest -q --no-header -p no:cacheprovider python/triton_dist/test/ascend 2>&1 | tail -8; echo "== nvshmem tests $SECONDS s"

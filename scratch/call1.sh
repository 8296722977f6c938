export TRITON_CACHE_DIR=/tmp/robust_cache
ls -d /usr/local/cuda*/bin/compute-sanitizer /opt/nvidia/*/compute-sanitizer 2>/dev/null; which compute-sanitizer
T="python3 -m torch.distributed.run --nproc-per-node=2"
timeout 45 python3 -m pytest -q --no-header -p no:cacheprovider python/triton_dist/test/shmem/test_kernel_waits_two_gpus.py > $OUT/waits.txt 2>&1; tail -70 $OUT/waits.txt; echo "== waits $SECONDS s"
(TRITON_DIST_NVIDIA_HEAP=nvshmem timeout 30 $T --master-port 29811 tutorials/ascend/01-ascend-allgather-gemm.py > $OUT/nvshmem.txt 2>&1; echo rc=$? >> $OUT/nvshmem.txt) &
timeout 40 python3 benchmarks/sanitize.py --seconds 25 --log $OUT/memcheck.log > $OUT/memcheck.txt 2>&1; tail -30 $OUT/memcheck.txt; echo "== memcheck $SECONDS s"
wait; echo "== nvshmem"; tail -25 $OUT/nvshmem.txt
TRITON_DIST_WAIT_TIMEOUT=1 timeout 30 $T --master-port 29813 scratch/two_streams.py 30 > $OUT/streams.txt 2>&1; echo "rc=$? $SECONDS s"; grep -v "^\[ERROR\|^  rank" $OUT/streams.txt | tail -30
s=$SECONDS; timeout 15 $T --master-port 29812 scratch/hang_exit.py > $OUT/hang.txt 2>&1; echo "rc=$? $((SECONDS-s)) s"; tail -12 $OUT/hang.txt
echo "== end $SECONDS s"

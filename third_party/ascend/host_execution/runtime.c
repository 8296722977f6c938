// What the host form of a lowered kernel calls, and the grid that runs it: one thread a program, so that programs may wait for
// one another, in this process and in others.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// Written for each kernel by build.py: calls it with the grid and a program's place in it.
extern void triton_dist_program(const int64_t *arguments, const int32_t grid[3], const int32_t program[3]);

enum { CHUNK = 1 << 20, PATIENCE = 256 };
static const double GRACE_S = 5; // a program that passes no fence ends the process so much later

typedef struct chunk { struct chunk *next; size_t used, size; } chunk;
typedef struct {
  const int64_t *arguments;
  const int32_t *grid;
  int32_t program[3];
  double deadline;
  chunk *memory;   // local buffers of the program: they live until it ends
  long fences;
  jmp_buf gave_up;
  int status;      // 0 ended, 1 gave up at the deadline
} state;

static __thread state *self;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

// tl.debug_barrier and the cube-vector pairs. A program that passes many of them polls: it lets others run, and gives up
// at the deadline, because the IR has no other place where it could.
void triton_dist_fence(void) {
  atomic_thread_fence(memory_order_seq_cst);
  if (++self->fences < PATIENCE)
    return;
  usleep(20);
  if (now() > self->deadline)
    longjmp(self->gave_up, 1);
}

// Local buffers begin with a pattern that is NaN in every float type: a lane that nobody wrote shows.
static void *allocate(size_t bytes, size_t alignment) {
  chunk *c = self->memory;
  uintptr_t at = c ? ((uintptr_t)c + c->used + alignment - 1) / alignment * alignment : 0;
  if (!c || at + bytes > (uintptr_t)c + c->size) {
    size_t size = sizeof(chunk) + alignment + bytes;
    if (size < CHUNK)
      size = CHUNK;
    c = malloc(size);
    if (!c)
      abort();
    c->next = self->memory, c->size = size;
    self->memory = c;
    at = ((uintptr_t)c + sizeof(chunk) + alignment - 1) / alignment * alignment;
  }
  c->used = at + bytes - (uintptr_t)c;
  return memset((void *)at, 0xff, bytes);
}
void *_mlir_memref_to_llvm_alloc(size_t bytes) { return allocate(bytes, 64); }
void *_mlir_memref_to_llvm_aligned_alloc(size_t alignment, size_t bytes) { return allocate(bytes, alignment); }
void _mlir_memref_to_llvm_free(void *p) { (void)p; }

// MLIR's runtime function for strided copies.
typedef struct { int64_t rank; void *descriptor; } unranked;
typedef struct { char *base, *data; int64_t offset; int64_t sizes_and_strides[]; } ranked;

static void copy(int64_t size, int64_t rank, const int64_t *n, char *from, const int64_t *from_stride, char *to, const int64_t *to_stride) {
  if (rank == 0) {
    memcpy(to, from, size);
    return;
  }
  if (rank == 1 && *from_stride == 1 && *to_stride == 1) {
    memcpy(to, from, *n * size);
    return;
  }
  for (int64_t i = 0; i < *n; i++)
    copy(size, rank - 1, n + 1, from + i * *from_stride * size, from_stride + 1, to + i * *to_stride * size, to_stride + 1);
}

void memrefCopy(int64_t size, unranked *source, unranked *target) {
  ranked *s = source->descriptor, *t = target->descriptor;
  int64_t r = source->rank, *n = s->sizes_and_strides;
  copy(size, r, n, s->data + s->offset * size, n + r, t->data + t->offset * size, t->sizes_and_strides + r);
}

// fp32 to bf16, which x86-64 does not have: to nearest, ties to even. The result is in the low bits of xmm0, as of a _Float16.
_Float16 __truncsfbf2(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint16_t half = x != x ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  _Float16 result;
  memcpy(&result, &half, 2);
  return result;
}

static void combine_f32(int64_t address, float x, int largest) {
  _Atomic uint32_t *word = (_Atomic uint32_t *)address;
  uint32_t seen = atomic_load(word), bits;
  memcpy(&bits, &x, 4);
  for (;;) {
    float old;
    memcpy(&old, &seen, 4);
    int replace = x != x || (largest ? x > old : x < old);
    if (!replace || atomic_compare_exchange_strong(word, &seen, bits))
      return;
  }
}
void triton_dist_atomic_max_f32(int64_t address, float x) { combine_f32(address, x, 1); }
void triton_dist_atomic_min_f32(int64_t address, float x) { combine_f32(address, x, 0); }

static void *run(void *argument) {
  state *s = self = argument;
  if (setjmp(s->gave_up) == 0)
    triton_dist_program(s->arguments, s->grid, s->program);
  else
    s->status = 1;
  while (s->memory) {
    chunk *next = s->memory->next;
    free(s->memory);
    s->memory = next;
  }
  return 0;
}

// Runs the grid. `ended` gets a byte for each program, x fastest: 0 ended, 1 gave up after limit_s in a wait, 2 runs on
// (then this process must end: the program may still write). Returns the largest of them, -1 when no thread can be made.
int triton_dist_launch(const int64_t *arguments, const int32_t grid[3], double limit_s, unsigned char *ended) {
  int64_t programs = (int64_t)grid[0] * grid[1] * grid[2], started = 0;
  state *states = calloc(programs, sizeof *states);
  pthread_t *threads = calloc(programs, sizeof *threads);
  double deadline = now() + limit_s;
  int worst = states && threads ? 0 : -1;
  for (; worst == 0 && started < programs; started++) {
    state *s = &states[started];
    s->arguments = arguments, s->grid = grid, s->deadline = deadline;
    s->program[0] = started % grid[0];
    s->program[1] = started / grid[0] % grid[1];
    s->program[2] = started / grid[0] / grid[1];
    if (pthread_create(&threads[started], 0, run, s))
      worst = -1;
  }
  started -= worst == -1 && started > 0;
  for (int64_t i = 0; i < started; i++) {
    double left = deadline + GRACE_S - now();
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_sec += left > 0 ? (time_t)left + 1 : 0;
    ended[i] = pthread_timedjoin_np(threads[i], 0, &t) ? 2 : states[i].status;
    if (worst >= 0 && ended[i] > worst)
      worst = ended[i];
  }
  if (worst != 2) // a thread that runs on still uses them
    free(states), free(threads);
  return worst;
}

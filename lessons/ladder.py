"""A product in CUDA, four times: down columns, along rows, in shared memory, coarsened.

    python -m lessons ladder

A GPU runs and times the kernels. A CPU runs the same text: a class takes float's place, each thread of a block is a
thread of the CPU, and what the first warp reads is written down, so that its sectors and passes are counted.

GPU introduction, 2.4; Ultra-Scale Playbook, the chapter on GPUs. docs/reading.md, "Tiles", has the same in Triton.
"""

import ctypes
import functools

import torch

from lessons.bench.timing import off, say, seconds_of
from lessons.extension import build, missing
from lessons.machine import bank_passes, sectors, WARP

KERNELS = """
const int SIDE = 32;  // a block is SIDE x SIDE threads; those of one threadIdx.y are a warp

// All: C = A B, n x n numbers each, row after row.
__global__ void down_columns(const float *A, const float *B, float *C, int n) {
    int row = blockIdx.x * SIDE + threadIdx.x;     // a warp has 32 rows: what it reads of A lies n numbers apart
    int column = blockIdx.y * SIDE + threadIdx.y;
    float sum = 0;
    for (int k = 0; k < n; k++) sum += A[row * n + k] * B[k * n + column];
    C[row * n + column] = sum;
}

__global__ void along_rows(const float *A, const float *B, float *C, int n) {
    int row = blockIdx.y * SIDE + threadIdx.y;
    int column = blockIdx.x * SIDE + threadIdx.x;  // a warp has 32 columns: it reads one number of A, neighbours of B
    float sum = 0;
    for (int k = 0; k < n; k++) sum += A[row * n + k] * B[k * n + column];
    C[row * n + column] = sum;
}

// A thread has R x R outputs, SIDE apart, so a block has tiles of R SIDE rows of A and R SIDE columns of B. All threads
// bring them, then all read them: each number SIDE times, and from registers R times more.
template <int R> __global__ void __launch_bounds__(SIDE * SIDE) in_tiles(const float *A, const float *B, float *C,
                                                                         int n) {
    __shared__ float a[R * SIDE][SIDE], b[SIDE][R * SIDE];
    int row = blockIdx.y * R * SIDE + threadIdx.y;
    int column = blockIdx.x * R * SIDE + threadIdx.x;
    float sums[R][R] = {}, x[R], y[R];
    for (int first = 0; first < n; first += SIDE) {
        for (int i = 0; i < R; i++) {
            a[threadIdx.y + i * SIDE][threadIdx.x] = A[(row + i * SIDE) * n + first + threadIdx.x];
            b[threadIdx.y][threadIdx.x + i * SIDE] = B[(first + threadIdx.y) * n + column + i * SIDE];
        }
        __syncthreads();                           // the tiles are whole
        for (int k = 0; k < SIDE; k++) {
            for (int i = 0; i < R; i++) {
                x[i] = a[threadIdx.y + i * SIDE][k];
                y[i] = b[k][threadIdx.x + i * SIDE];
            }
            for (int i = 0; i < R; i++)
                for (int j = 0; j < R; j++) sums[i][j] += x[i] * y[j];
        }
        __syncthreads();                           // nobody reads them any more
    }
    for (int i = 0; i < R; i++)
        for (int j = 0; j < R; j++) C[(row + i * SIDE) * n + column + j * SIDE] = sums[i][j];
}

extern "C" void product(int step, const float *A, const float *B, float *C, int n) {
    if (step == 0) RUN(down_columns, n / SIDE);
    if (step == 1) RUN(along_rows, n / SIDE);
    if (step == 2) RUN(in_tiles<1>, n / SIDE);
    if (step == 3) RUN(in_tiles<4>, n / (4 * SIDE));
}
"""

ON_GPU = "#define RUN(kernel, blocks) kernel<<<dim3(blocks, blocks), dim3(SIDE, SIDE)>>>(A, B, C, n)"

ON_CPU = """
#include <barrier>
#include <cstdlib>
#include <thread>
#include <vector>

static struct { int x, y; } blockIdx;
static thread_local struct { int x, y; } threadIdx;
static thread_local long reads;
static long *log, room;       // what threads of the first warp have read: `room` addresses each
static std::barrier<> *gate;

struct Number {
    float value;
    Number(float value = 0) : value(value) {}
    Number(const Number &other) : value(other) {}
    Number &operator=(const Number &other) { value = other; return *this; }
    Number &operator+=(float more) { value += more; return *this; }
    operator float() const {
        char here;            // a thread's own variables lie near: they are its registers
        bool memory = std::abs((const char *) this - &here) > 1 << 16;
        if (memory && !threadIdx.y && !blockIdx.x && !blockIdx.y && reads < room)
            log[threadIdx.x * room + reads++] = (long) this;
        return value;
    }
};

template <class Kernel> void play(int side, int blocks, Kernel kernel) {  // block after block
    std::barrier all(side * side);
    gate = &all;
    for (blockIdx.y = 0; blockIdx.y < blocks; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
            std::vector<std::thread> threads;
            for (int i = 0; i < side * side; i++)
                threads.emplace_back([=] { threadIdx = {i % side, i / side}; kernel(); });
            for (auto &thread : threads) thread.join();
        }
}

extern "C" void record(long *into, long size) { log = into, room = size; }

#define RUN(kernel, blocks) play(SIDE, blocks, [=] { kernel(A, B, C, n); })
#define __global__
#define __launch_bounds__(threads)
#define __shared__ static
#define __syncthreads() gate->arrive_and_wait()
#define float Number
"""

STEPS = {  # name: (R, sectors that a warp reads for one multiply-add of each of its threads, what the text measured)
    "down columns": (1, 33, ""), "along rows": (1, 5, "10 times the throughput"),
    "in shared memory": (1, 1 / 4, "43 % less time: 410 GB/s, 6.6 TFLOP/s"),
    "coarsened": (4, 1 / 16, "(fewer accesses to shared memory)")}


def product(library, step, a, b, c):
    """c = a b by the kernel of that number. (n, n), float32; 32 R divides n."""
    library.product(step, *(ctypes.c_void_p(t.data_ptr()) for t in (a, b, c)), len(a))
    return c


def timed(n):
    """{name: (function, inputs)} of the kernels on a GPU, and of PyTorch's product."""
    library = build("ladder", f"{ON_GPU}\n{KERNELS}", cuda=True)
    a, b, c = torch.randn(3, n, n, device="cuda")
    kernels = {name: (functools.partial(product, library, step), [a, b, c]) for step, name in enumerate(STEPS)}
    return kernels | {"PyTorch's": (torch.mm, [a, b])}


def played(library, step, R):
    """What the first warp of four blocks reads for one multiply-add of each of its threads: (sectors of global memory,
    passes of shared memory, the relative error of C)."""
    n = 2 * WARP * R
    a, b, c = abc = torch.randn(3, n, n)
    log = torch.zeros(WARP, 9 * n, dtype=torch.int64)
    library.record(ctypes.c_void_p(log.data_ptr()), log.shape[1])
    product(library, step, a, b, c)
    loads = [[address // 4 for address in load] for load in log.T.tolist() if load[0]]
    everywhere = range(abc.data_ptr() // 4, abc.data_ptr() // 4 + abc.numel())
    read = sum(sectors(load) for load in loads if load[0] in everywhere)
    passes = sum(bank_passes(load) for load in loads if load[0] not in everywhere)
    return read / n / R**2, passes / n / R**2, off(c, a @ b)


def demo_ladder():
    """A product in CUDA in four steps: what a warp reads, counted on the CPU; on a GPU how long it takes."""
    cuda, n, seconds = torch.cuda.is_available(), 4096, {}
    if lacks := missing(cuda):
        return say(f"not built: {' and '.join(lacks)} not found")
    if cuda:
        seconds = seconds_of(timed(n), torch.device("cuda"), 5)
    library = build("ladder_on_a_cpu", ON_CPU + KERNELS, cuda=False)
    say("C = A B, float32. What a warp reads for one multiply-add of each of its 32 threads, played on the CPU"
        + f"; {n} x {n} on the GPU, GB/s of sectors" * cuda + f"\n{'':18}{'sectors':>9}{'passes':>8}{'error of C':>12}"
        + f"{'ms':>9}{'TFLOP/s':>9}{'GB/s':>9}   the text's" * cuda)
    for step, (name, (R, law, text)) in enumerate(STEPS.items()):
        read, passes, error = played(library, step, R)
        line = f"{name:18}{read:9.4f}{passes:8.2f}{error:12.0e}"
        if cuda:
            took, = seconds[name]
            line += f"{1e3 * took:9.2f}{2e-12 * n**3 / took:9.2f}{1e-9 * law * n**3 / took:9,.0f}   {text}"
        say(line)
    if cuda:
        took, = seconds["PyTorch's"]
        say(f"{name:47}{1e3 * took:9.2f}{2e-12 * n**3 / took:9.2f}")

"""Kernels in CUDA: an addition; branches; a product down columns, along rows, in shared memory, coarsened.

    python -m lessons ladder

A GPU runs and times the kernels. A CPU runs the same text: a class takes float's place, each thread of a block is a
thread of the CPU, and what the first warp reads is written down, so that its sectors and passes are counted. It needs
ninja and a C++ compiler, on a GPU also nvcc.

GPU introduction, 2.4; Ultra-Scale Playbook, the chapters on GPUs and "C++ extension". docs/reading.md, "Tiles", has the
product in Triton.
"""

import ctypes
import functools
import os
import shutil
import tempfile

import torch

from lessons.bench.timing import off, say, seconds_of
from lessons.machine import bank_passes, sectors, WARP

KERNELS = """
__global__ void add_kernel(const float *x, const float *y, float *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;  // this thread's element: neighbours have neighbours
    if (i < n) out[i] = x[i] + y[i];                // the last block may reach beyond the end
}

__global__ void branch_kernel(float *x, int ways) {  // thread t takes branch t % ways, each as long as the others
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float v = x[i];
    for (int way = 0; way < ways; way++)
        if (threadIdx.x % ways == way)
            for (int k = 0; k < 1000; k++) v = v * 0.999f + way;
    x[i] = v;
}

// The next: C = A B, n x n numbers each, row after row. A block is SIDE x SIDE threads; those of one threadIdx.y are a
// warp.
const int SIDE = 32;

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

// Host code: how many blocks of how many threads run a kernel.
extern "C" void add(const float *x, const float *y, float *out, int n) {
    RUN(add_kernel, (n + 255) / 256, 1, 256, 1, x, y, out, n);
}

extern "C" void branch(float *x, int ways, int n) {
    RUN(branch_kernel, n / 256, 1, 256, 1, x, ways);
}

extern "C" void product(int step, const float *A, const float *B, float *C, int n) {
    int blocks = n / SIDE;
    if (step == 0) RUN(down_columns, blocks, blocks, SIDE, SIDE, A, B, C, n);
    if (step == 1) RUN(along_rows, blocks, blocks, SIDE, SIDE, A, B, C, n);
    if (step == 2) RUN(in_tiles<1>, blocks, blocks, SIDE, SIDE, A, B, C, n);
    if (step == 3) RUN(in_tiles<4>, blocks / 4, blocks / 4, SIDE, SIDE, A, B, C, n);
}
"""

ON_GPU = """#define RUN(kernel, columns, rows, width, height, ...) \\
    kernel<<<dim3(columns, rows), dim3(width, height)>>>(__VA_ARGS__)
"""

ON_CPU = """
#include <barrier>
#include <cstdlib>
#include <thread>
#include <vector>

static struct { int x, y; } blockIdx, blockDim;
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

template <class Kernel> void play(int columns, int rows, int width, int height, Kernel kernel) {  // block after block
    std::barrier all(width * height);
    gate = &all;
    blockDim = {width, height};
    for (blockIdx.y = 0; blockIdx.y < rows; blockIdx.y++)
        for (blockIdx.x = 0; blockIdx.x < columns; blockIdx.x++) {
            std::vector<std::thread> threads;
            for (int i = 0; i < width * height; i++)
                threads.emplace_back([=] { threadIdx = {i % width, i / width}; kernel(); });
            for (auto &thread : threads) thread.join();
        }
}

extern "C" void record(long *into, long size) { log = into, room = size; }

#define RUN(kernel, columns, rows, width, height, ...) play(columns, rows, width, height, [=] { kernel(__VA_ARGS__); })
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


def missing(cuda):
    """What is not on this machine, of what C++ or CUDA is built with."""
    from torch.utils import cpp_extension  # late, because it asks for GPUs: a process that has cannot be forked
    return [what for what in ("ninja", "nvcc" if cuda else cpp_extension.get_cxx_compiler()) if not shutil.which(what)]


def build(cuda):
    """The kernels' library, as ctypes sees it: built by torch.utils.cpp_extension in a folder that is then removed."""
    from torch.utils import cpp_extension
    name, source = ("ladder", ON_GPU + KERNELS) if cuda else ("ladder_on_a_cpu", ON_CPU + KERNELS)
    with tempfile.TemporaryDirectory() as folder:
        cpp_extension.load_inline(
            name, [] if cuda else [source], [source] if cuda else None, is_python_module=False, with_cuda=cuda,
            no_implicit_headers=True, extra_cflags=["-std=c++20"], build_directory=folder)
        return ctypes.CDLL(os.path.join(folder, f"{name}.so"))


def addresses(*tensors):
    return [ctypes.c_void_p(t.data_ptr()) for t in tensors]


def product(library, step, a, b, c):
    """c = a b by the kernel of that number. (n, n), float32; 32 R divides n."""
    library.product(step, *addresses(a, b, c), len(a))
    return c


def timed(library, n):
    """{name: (function, inputs)} of the products on a GPU, and of PyTorch's."""
    a, b, c = torch.randn(3, n, n, device="cuda")
    kernels = {name: (functools.partial(product, library, step), [a, b, c]) for step, name in enumerate(STEPS)}
    return kernels | {"PyTorch's": (torch.mm, [a, b])}


def played(library, step, R):
    """What the first warp of four blocks reads for one multiply-add of each of its threads: (sectors of global memory,
    passes of shared memory, the relative error of C)."""
    n = 2 * WARP * R
    a, b, c = abc = torch.randn(3, n, n)
    log = torch.zeros(WARP, 9 * n, dtype=torch.int64)
    library.record(*addresses(log), log.shape[1])
    product(library, step, a, b, c)
    loads = [[address // 4 for address in load] for load in log.T.tolist() if load[0]]
    everywhere = range(abc.data_ptr() // 4, abc.data_ptr() // 4 + abc.numel())
    read = sum(sectors(load) for load in loads if load[0] in everywhere)
    passes = sum(bank_passes(load) for load in loads if load[0] not in everywhere)
    return read / n / R**2, passes / n / R**2, off(c, a @ b)


def demo_ladder():
    """Kernels in CUDA: add, and a product in four steps: what a warp reads, counted on the CPU; on a GPU also timed."""
    cuda, n = torch.cuda.is_available(), 4096
    if lacks := missing(cuda) or missing(False):
        return say(f"not built: {' and '.join(lacks)} not found")
    on_cpu = build(cuda=False)
    x, y, out = torch.randn(3, 1000)
    on_cpu.add(*addresses(x, y, out), len(x))
    say(f"add_kernel, played on the CPU: {'equal to' if torch.equal(out, x + y) else 'not'} PyTorch's")
    seconds = {}
    if cuda:
        library = build(cuda=True)
        x, y, out = torch.randn(3, 1 << 24, device="cuda")
        pointers = addresses(x, y, out)
        seconds = seconds_of({
            "add_kernel": (library.add, [*pointers, len(x)]), "PyTorch's add": (torch.add, [x, y])} | {
            f"a warp takes {ways} branches": (library.branch, [pointers[0], ways, len(x)]) for ways in (1, 2, 4, 32)},
            x.device, 5)
        for what, (took,) in seconds.items():
            say(f"  {what:28}{1e3 * took:10.3f} ms")
        seconds = seconds_of(timed(library, n), x.device, 5)
    say("C = A B, float32. What a warp reads for one multiply-add of each of its 32 threads, played on the CPU"
        + f"; {n} x {n} on the GPU, GB/s of sectors" * cuda + f"\n{'':18}{'sectors':>9}{'passes':>8}{'error of C':>12}"
        + f"{'ms':>9}{'TFLOP/s':>9}{'GB/s':>9}   the text's" * cuda)
    for step, (name, (R, law, text)) in enumerate(STEPS.items()):
        read, passes, error = played(on_cpu, step, R)
        line = f"{name:18}{read:9.4f}{passes:8.2f}{error:12.0e}"
        if cuda:
            took, = seconds[name]
            line += f"{1e3 * took:9.2f}{2e-12 * n**3 / took:9.2f}{1e-9 * law * n**3 / took:9,.0f}   {text}"
        say(line)
    if cuda:
        took, = seconds["PyTorch's"]
        say(f"{'PyTorch:':47}{1e3 * took:9.2f}{2e-12 * n**3 / took:9.2f}")

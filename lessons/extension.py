"""A kernel of one's own in C++ or CUDA, built by torch.utils.cpp_extension, called with the addresses of tensors.

    python -m lessons extension

It needs ninja and a C++ compiler, on a GPU also nvcc. Ultra-Scale Playbook, "C++ extension".
"""

import ctypes
import os
import shutil
import tempfile

import torch

from lessons.bench.timing import say, seconds_of

LOOP = """
extern "C" void add(const float *x, const float *y, float *out, long n) {
    for (long i = 0; i < n; i++) out[i] = x[i] + y[i];
}
"""

KERNELS = """
__global__ void add_kernel(const float *x, const float *y, float *out, long n) {
    long i = blockIdx.x * (long) blockDim.x + threadIdx.x;  // this thread's element: neighbours have neighbours
    if (i < n) out[i] = x[i] + y[i];                        // the last block may reach beyond the end
}

__global__ void branch_kernel(float *x, int ways) {  // thread t takes branch t % ways, each as long as the others
    long i = blockIdx.x * (long) blockDim.x + threadIdx.x;
    float v = x[i];
    for (int way = 0; way < ways; way++)
        if (threadIdx.x % ways == way)
            for (int k = 0; k < 1000; k++) v = v * 0.999f + way;
    x[i] = v;
}

extern "C" void add(const float *x, const float *y, float *out, long n) {  // host code: blocks of 256 threads
    add_kernel<<<(n + 255) / 256, 256>>>(x, y, out, n);
}

extern "C" void branch(float *x, int ways, long n) {
    branch_kernel<<<n / 256, 256>>>(x, ways);
}
"""


def missing(cuda):
    """What is not on this machine, of what C++ or CUDA is built with."""
    from torch.utils import cpp_extension  # late, because it asks for GPUs: a process that has cannot be forked
    return [what for what in ("ninja", "nvcc" if cuda else cpp_extension.get_cxx_compiler()) if not shutil.which(what)]


def build(name, source, cuda):
    """The library of a text in C++ or CUDA, as ctypes sees it: built in a folder that is then removed."""
    from torch.utils import cpp_extension
    with tempfile.TemporaryDirectory() as folder:
        cpp_extension.load_inline(
            name, [] if cuda else [source], [source] if cuda else None, is_python_module=False, with_cuda=cuda,
            no_implicit_headers=True, extra_cflags=["-std=c++20"], build_directory=folder)
        return ctypes.CDLL(os.path.join(folder, f"{name}.so"))


def demo_extension():
    """Build an addition in C++ or CUDA, run it beside PyTorch's; on a GPU also time branches."""
    cuda = torch.cuda.is_available()
    if lacks := missing(cuda):
        return say(f"not built: {' and '.join(lacks)} not found")
    device, library = torch.device("cuda" if cuda else "cpu"), build("add", KERNELS if cuda else LOOP, cuda)
    x, y, out = torch.randn(3, 1 << 24, device=device)
    addresses, n = [ctypes.c_void_p(t.data_ptr()) for t in (x, y, out)], ctypes.c_long(len(x))
    library.add(*addresses, n)
    say(f"add in {'CUDA' if cuda else 'C++'}: {'equal to' if torch.equal(out, x + y) else 'not'} PyTorch's")
    functions = {"ours": (library.add, [*addresses, n]), "PyTorch's": (torch.add, [x, y])}
    if cuda:
        functions |= {f"a warp takes {ways} branches": (library.branch, [addresses[0], ways, n])
                      for ways in (1, 2, 4, 32)}
    for what, (seconds,) in seconds_of(functions, device, 5).items():
        say(f"  {what:28}{1e3 * seconds:10.3f} ms")

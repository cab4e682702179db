"""What a kernel becomes: Triton compiles for a GPU that need not be there, and what came out is counted.

    python -m lessons compile

A kernel goes through five languages. Triton's own and its GPU dialect (ttir, ttgir) work on whole tiles; the second
says which thread holds which number. LLVM's and PTX are one thread's program. The cubin is what the GPU runs. Each
memory instruction of PTX names its width, so coalescing is read off it: a thread whose four numbers of 4 bytes lie side
by side loads them with one `v4.b32`. CS336 lectures 5 and 6.
"""

import os
import re
import subprocess
import tempfile
from collections import Counter

import kernels
from kernels import HAVE_TRITON, tl, triton
from further.bad_input import reject
from further.tiles import _matmul

REGISTERS, WARPS, SHARED = 65_536, 64, 228 << 10  # of a multiprocessor of an H100; SHARED in bytes
RESERVED = 1024                                   # bytes of SHARED that the driver takes a program
NAMED = r"(?:ld|st)\.global[.\w]*|cp\.async\.c\w[.\w]*|wgmma\.mma_async[.\w]*|mma\.sync[.\w]*"  # in PTX


@triton.jit
def _copy(x_ptr, y_ptr, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i * STRIDE))


def compiled(kernel, types, constants, num_warps=4):
    """The kernel as an H100 runs it. types: {argument: "*bf16", "i32", ...}; constants: {argument: value}. Pointers and
    whole numbers are multiples of 16, as Triton finds at a launch, too, but for those of type "odd"; else no load may
    be wide."""
    from triton.backends.compiler import GPUTarget
    names = kernel.arg_names
    source = triton.compiler.ASTSource(
        kernel, {name: types.get(name, "constexpr").replace("odd", "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items()
         if kind not in ("fp32", "odd")})
    options = {"num_warps": num_warps, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def registers_of(made):
    """Registers of a thread, by the tool of NVIDIA's that Triton brings."""
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return int(re.search(r"REG:(\d+)", usage.stdout)[1])


def occupancy(registers, shared, num_warps):
    """Warps that a multiprocessor holds at once. Registers are given to a warp in steps of 8 a thread."""
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * num_warps)
    programs = min(by_registers, SHARED // (shared + RESERVED), WARPS // num_warps)
    return programs * num_warps


def cases():
    """(name, kernel, types, constants, warps)"""
    floats = {"x_ptr": "*fp32", "y_ptr": "*fp32"}
    for stride in 1, 2:
        yield f"copy, stride {stride}", _copy, floats, {"STRIDE": stride, "BLOCK": 1024}, 4
    sizes = dict.fromkeys(("M", "N", "K", "a_row", "b_row"), "i32")
    for kind in "bf16", "fp32":
        rows = dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "y_ptr"), f"*{kind}")
        statistics = {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", "width": "i32", "eps": "fp32"}
        yield f"layer norm of 1024, {kind}", kernels._layer_norm, rows | statistics, {"BLOCK": 1024}, 8
        matrices = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), f"*{kind}")
        tiles = {"FUNCTION": None, "BM": 128, "BN": 128, "BK": 32, "GROUP": 8, "a_column": 1, "b_column": 1}
        yield f"product, {kind}", _matmul, matrices | sizes, tiles, 8
        if kind == "bf16":
            yield "  with GELU, one kernel", _matmul, matrices | sizes, tiles | {"FUNCTION": kernels._gelu}, 8
            yield "  B's rows of 50,257", _matmul, matrices | sizes | {"N": "odd", "b_row": "odd"}, tiles, 8


def demo_compile():
    """What kernels become for a GPU that is not there: loads by width, products, registers, occupancy."""
    reject(not HAVE_TRITON or kernels.INTERPRETED,
           "compile takes Triton's compiler, of Linux, and not its interpreter: give "
           "env -u TRITON_INTERPRET python -m lessons compile")
    print("for an H100; a program's PTX: how often each instruction of memory and of products stands in it\n"
          f"{'kernel':26}{'registers':>10}{'shared':>10}{'warps':>7}  instructions")
    for name, kernel, types, constants, num_warps in cases():
        made = compiled(kernel, types, constants, num_warps)
        registers, shared = registers_of(made), made.metadata.shared
        counts = Counter(re.findall(NAMED, made.asm["ptx"])).items()
        print(f"{name:26}{registers:10}{shared:10,}{occupancy(registers, shared, num_warps):4}/{WARPS}  "
              + ", ".join(f"{n} {what}" for what, n in counts))
    lines = {step: len(text.splitlines()) for step, text in made.asm.items() if isinstance(text, str)}
    print(f"the last one's lines: {', '.join(f'{step} {n:,}' for step, n in lines.items() if step != 'source')}; cubin "
          f"{len(made.asm['cubin']):,} bytes")

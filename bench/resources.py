"""The registers, spills and shared memory of the CUDA kernels in two builds, compared without a GPU.

    python -m bench resources OLD/_cuda.abi3.so NEW/_cuda.abi3.so

Takes modules or objects, and needs cuobjdump and nvdisasm: from a CUDA toolkit, or from `pip install
nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm`. Kernels with the same machine code in both builds are the same, whatever
their names. The others are compared by name, and those that only one build has are listed. A kernel is worse if it
spills more, or if a multiprocessor of sm_90 has room for fewer of its blocks. Ends with 1 if one is.
"""

import collections
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

# Of a multiprocessor of sm_90.
REGISTERS, THREADS, BLOCKS, SHARED = 65536, 2048, 32, 227 << 10
WARP, LARGEST_BLOCK = 32, 1024
# The hardware allots registers to a warp in pieces of so many, and a block has a kilobyte of shared memory of its own.
PIECE, OWN_SHARED = 256, 1024


class Kernel(NamedTuple):
    registers: int
    stack: int  # bytes a thread, spills among them
    shared: int  # bytes a block that the kernel declares; what a launch adds is not seen
    threads: int  # the most of a block
    code: str  # a digest of the machine code

    @property
    def blocks(self):
        """How many of its largest blocks a multiprocessor holds."""
        warps = -(-self.threads // WARP)
        by_registers = REGISTERS // (-(-self.registers * WARP // PIECE) * PIECE * warps)
        return min(BLOCKS, THREADS // (warps * WARP), by_registers, SHARED // (self.shared + OWN_SHARED))

    def __str__(self):
        return (
            f"{self.registers} registers, {self.stack} bytes of stack, {self.shared} of shared memory, {self.blocks} x "
            f"{self.threads} threads"
        )


def add_arguments(parser):
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)


def cuobjdump():
    """The program's path."""
    found = shutil.which("cuobjdump")
    spec = importlib.util.find_spec("nvidia")
    places = [] if spec is None else spec.submodule_search_locations
    wheels = [str(path) for place in places for path in Path(place).glob("cu*/bin/cuobjdump")]
    if not found and not wheels:
        packages = "nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
        raise SystemExit(f"cuobjdump is missing: put a CUDA toolkit on PATH, or pip install {packages}")
    return found or wheels[0]


def dump(option, path):
    program = Path(cuobjdump())
    beside = f"{program.parent}{os.pathsep}{os.environ['PATH']}"  # it calls nvdisasm
    done = subprocess.run([program, option, path], capture_output=True, text=True, env=os.environ | {"PATH": beside})
    if done.returncode:
        raise SystemExit(f"{program.name} {option} {path} failed: {done.stderr.strip() or 'is nvdisasm there?'}")
    return done.stdout


def sections(text, title):
    """(name, text) of each part that begins with a title and a kernel's name."""
    _, *parts = re.split(rf"^\s*{title}\s*(\S+?):?\s*$", text, flags=re.MULTILINE)
    # An anonymous namespace has another name in each build.
    names = (re.sub(r"\d+_GLOBAL__N__[0-9a-f]{8}_\w+?_cu_[0-9a-f]{8}", "", name) for name in parts[::2])
    return zip(names, parts[1::2], strict=True)


def digest(code):
    """Of a kernel's instructions, without their addresses and the names of what they call."""
    lines = (re.sub(r"/\*.*?\*/", "", line).strip() for line in code.splitlines())
    instructions = [re.sub(r"_Z\w+|\$\w+", "", line) for line in lines if line and not line.startswith((".", "="))]
    return hashlib.sha256("\n".join(instructions).encode()).hexdigest()


def kernels(path):
    """Those of a module or an object, by their mangled names."""
    usage = {
        name: {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED):(\d+)", text)}
        for name, text in sections(dump("--dump-resource-usage", path), "Function")
    }
    threads = {
        name: int(found[1], 16)
        for name, text in sections(dump("-elf", path), r"\.nv\.info\.")
        if (found := re.search(r"EIATTR_MAX_THREADS\s.*?Value:\s*(0x\w+)", text, re.DOTALL))
    }
    code = {name: digest(text) for name, text in sections(dump("-sass", path), "Function :")}
    return {
        name: Kernel(found["REG"], found["STACK"], found["SHARED"], threads.get(name, LARGEST_BLOCK), code[name])
        for name, found in usage.items()
    }


def without(named, codes):
    """The kernels that are left once those with these digests are taken out, each as often as it is there."""
    left, rest = collections.Counter(codes), {}
    for name, kernel in named.items():
        if left[kernel.code] > 0:
            left[kernel.code] -= 1
        else:
            rest[name] = kernel
    return rest


def readable(name):
    if not shutil.which("c++filt"):
        return name
    return subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()


def is_worse(old, new):
    return new.stack > old.stack or new.blocks < old.blocks


def main(args):
    old, new = kernels(args.old), kernels(args.new)
    same = collections.Counter(kernel.code for kernel in old.values())
    same &= collections.Counter(kernel.code for kernel in new.values())
    print(f"{len(old)} kernels, now {len(new)}; the same machine code: {same.total()}")
    for title, field in (("registers", "registers"), ("bytes of stack", "stack")):
        before, after = (sum(getattr(kernel, field) for kernel in of.values()) for of in (old, new))
        print(f"{title} in all: {before}, now {after}")
    old, new = without(old, same), without(new, same)
    both = sorted(old.keys() & new.keys(), key=readable)
    worse = [name for name in both if is_worse(old[name], new[name])]
    for name in both:
        if old[name][:-1] != new[name][:-1]:
            print(f"{'WORSE' if name in worse else 'other'}: {readable(name)}\n  {old[name]}\n  {new[name]}")
    for title, named in (("only in the old build", old), ("only in the new build", new)):
        alone = {name: kernel for name, kernel in named.items() if name not in both}
        print(f"{title}: {len(alone)}")
        for name in sorted(alone, key=readable):
            print(f"  {readable(name)}: {alone[name]}")
    return 1 if worse else 0

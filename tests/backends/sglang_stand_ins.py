"""Have SGLang import on a CPU, for tests of its protocol: run by `make sglang` in the environment that has it.

SGLang 0.5.23 is made for GPUs and supports no such installation. Two things are put in place of what is not for a CPU: a
package `sgl_kernel` without kernels, whose functions raise, and an empty list of torchvision's operators for devices that
have no data. No test reaches either.
"""

import sysconfig
from pathlib import Path

KERNELS = '''"""A stand-in without kernels, made by tests/backends/sglang_stand_ins.py."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def lacking(*args, **options):
        raise RuntimeError(f"sgl_kernel.{name} is not here: this is a stand-in without kernels")

    return lacking
'''

if __name__ == "__main__":
    packages = Path(sysconfig.get_path("purelib"))
    kernels = packages / "sgl_kernel" / "__init__.py"
    kernels.parent.mkdir(exist_ok=True)
    kernels.write_text(KERNELS)
    (packages / "torchvision" / "_meta_registrations.py").write_text("")
    print(f"stand-ins for SGLang on a CPU are in {packages}")

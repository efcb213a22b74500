"""Compiles the extension, once per torch and source, and returns the variables that switch the device on."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["NotAvailableError", "environment", "library"]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAME = "fake_cuda_library"
TORCH = "2.13"  # the hooks and the operators' schemas are those of this release


class NotAvailableError(RuntimeError):
    """Why there is no pretended CUDA here."""


def library() -> Path:
    """Return the compiled extension, from the cache or from `torch.utils.cpp_extension`.

    Raises:
        NotAvailableError: this torch is another release or has CUDA, or there is no C++ compiler.
    """
    import torch
    from torch.utils import cpp_extension

    if not torch.__version__.startswith(TORCH + ".") or torch.version.cuda is not None:
        raise NotAvailableError(f"made for the CPU build of torch {TORCH}, and this is {torch.__version__}")
    compiler = cpp_extension.get_cxx_compiler()
    if shutil.which(compiler) is None:
        raise NotAvailableError(f"no C++ compiler: there is no {compiler!r}; install g++ or set CXX")
    if not cpp_extension.is_ninja_available():
        raise NotAvailableError("torch.utils.cpp_extension needs ninja: pip install ninja")
    sources = sorted((HERE / "csrc").glob("*.cpp"))
    key = hashlib.sha256(repr((torch.__version__, sys.version, compiler)).encode())
    for each in sorted((HERE / "csrc").iterdir()):
        key.update(each.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "parallelize-fake-cuda" / key.hexdigest()[:16]
    built = folder / f"{NAME}.so"
    if not built.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"compiling the pretended CUDA into {folder}", file=sys.stderr, flush=True)
        flags = ["-O1", "-g0", "-w"]
        # dlopen("libcudart.so.13") finds a library that is loaded under this name.
        linked = ["-Wl,-soname,libcudart.so.13"]
        # Two processes that compile at once wait for each other: torch locks the folder.
        cpp_extension.load(
            NAME,
            list(map(str, sources)),
            flags,
            extra_ldflags=linked,
            build_directory=str(folder),
            is_python_module=False,
        )
    return built


def environment() -> Mapping[str, str]:
    """Return the variables under which a Python process, and every one that it starts, has the pretended CUDA.

    `import torch` loads every installed entry point of the group "torch.backends": PYTHONPATH names a folder that
    holds one, beside a link to this package.
    """
    site = ROOT / "build" / "fake_cuda"
    info = site / "fake_cuda-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake_cuda\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nfake_cuda = fake_cuda.autoload:install\n")
    link = site / "fake_cuda"
    if not link.is_symlink():
        link.symlink_to(HERE)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTEST_PLUGINS": "fake_cuda.plugin"}
    try:
        variables["FAKE_CUDA"] = str(library())
    except NotAvailableError as reason:
        return {**variables, "FAKE_CUDA_UNAVAILABLE": str(reason)}
    report = site / f"report-{os.getpid()}"  # made by the first report, and removed by the plug-in that reads it
    report.unlink(missing_ok=True)
    return {**variables, "FAKE_CUDA_REPORT": str(report)}

"""The entry point that `import torch` calls: gives torch the pretended devices."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import warnings

__all__ = ["install"]


def install() -> None:
    """Load the extension named by FAKE_CUDA, and put it behind `torch.cuda`; do nothing without the variable."""
    path = os.environ.get("FAKE_CUDA")
    if not path:
        return
    name = "fake_cuda_library"
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    library = importlib.util.module_from_spec(spec)
    sys.modules[name] = library
    loader.exec_module(library)
    library.install_hooks()

    from fake_cuda import collectives, cuda_api, rnn_cells, sync_batch_norm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that kernels which refuse CUDA are replaced
        cuda_api.install(library)
        collectives.install(library)
        rnn_cells.install()
        sync_batch_norm.install()

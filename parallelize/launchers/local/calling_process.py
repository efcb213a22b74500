"""What a process that makes distributed calls keeps from one call to the next."""

from __future__ import annotations

import atexit
from dataclasses import dataclass, field

from parallelize.call.module_values import ImportedFiles
from parallelize.launchers.local.server_calls import ForkServers


@dataclass(frozen=True, eq=False)
class CallingProcess:
    """State of a process that is no rank of a run: it ends with the process.

    Attributes:
        fork_servers: fork the workers of calls on this machine, without a new import of torch for
            each call.
        imported_files: the user's modules as the first call has found them; an edited one is named
            at later calls.
    """

    fork_servers: ForkServers = field(default_factory=ForkServers)
    imported_files: ImportedFiles = field(default_factory=ImportedFiles)


calling_process = CallingProcess()
atexit.register(calling_process.fork_servers.end)

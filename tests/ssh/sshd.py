"""Two hosts for `ssh`: a real sshd each, on two loopback addresses of this machine."""

import getpass
import shutil
import socket
import subprocess
from pathlib import Path

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


class Hosts:
    """The hosts gpu1 and gpu2.

    Args:
        folder: for keys and configurations.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.sshds = folder, list[subprocess.Popen[bytes]]()
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-N", "", "-t", "ed25519", "-f", folder / name], check=True)
        self.config = folder / "config"
        entries = [f"StrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\nUser {getpass.getuser()}"]
        for number, address in enumerate(("127.0.0.1", "127.0.0.2"), start=1):
            with socket.create_server((address, 0)) as free:
                port = free.getsockname()[1]
            entries.append(f"Host gpu{number}\nHostName {address}\nPort {port}\nIdentityFile {folder / 'user'}")
            self._serve(number, address, port)
        self.config.write_text("\n".join(entries) + "\n")

    def wait(self) -> None:
        """Wait until both hosts answer."""
        for number in (1, 2):
            subprocess.run([*self.ssh, "-o", "ConnectionAttempts=60", f"gpu{number}", "true"], check=True, timeout=90)

    @property
    def ssh(self) -> tuple[str, ...]:
        """The command that reaches the hosts."""
        return "ssh", "-F", str(self.config)

    def _serve(self, number: int, address: str, port: int) -> None:
        config = self.folder / f"sshd{number}"
        config.write_text(
            f"ListenAddress {address}\nPort {port}\nHostKey {self.folder / 'host'}\nPidFile none\nUsePAM no\n"
            f"AuthorizedKeysFile {self.folder / 'user'}.pub\nStrictModes no\nPermitRootLogin yes\nMaxStartups 100\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd of root needs it
        self.sshds.append(subprocess.Popen([SSHD, "-D", "-E", self.folder / f"log{number}", "-f", config]))

    def close(self) -> None:
        """End both daemons; their connections are their own processes."""
        for each in self.sshds:
            each.terminate()
            each.wait()

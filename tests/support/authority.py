"""A certificate authority for tests of TLS."""

import subprocess
from pathlib import Path

from contracts.bus import Credentials

CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """A certificate authority in a directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self.ca = directory / "ca.pem"
        self._openssl("req", "-x509", *CURVE, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ours")

    def issue(self, name: str) -> tuple[str, str]:
        """Files of a new certificate for 127.0.0.1 and of its key."""
        extensions = self._directory / "san.cnf"
        extensions.write_text("subjectAltName=IP:127.0.0.1\n")
        self._openssl("req", *CURVE, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san.cnf")
        self._openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
        return str(self._directory / f"{name}.pem"), str(self._directory / f"{name}.key")

    def credentials(self, name: str, seed_file: str = "") -> Credentials:
        cert, key = self.issue(name)
        return Credentials(seed_file=seed_file, ca_file=str(self.ca), cert_file=cert, key_file=key)

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._directory, check=True, capture_output=True)

"""What integration tests of several packages have in common."""

import subprocess
from pathlib import Path

import pytest

from tests.support.runs.programs import find_program

KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.crt, server.crt of 127.0.0.1 signed by it, and other.crt of a CA that signed nothing."""
    folder = tmp_path_factory.mktemp("certificates")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    sign = "-CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile names"
    for words in (
        *(f"req -x509 {KEY} -keyout {name}.key -out {name}.crt -days 2 -subj /CN={name}" for name in ("ca", "other")),
        f"req {KEY} -keyout server.key -out server.csr -subj /CN=server",
        f"x509 -req -in server.csr {sign} -out server.crt",
    ):
        command = [find_program("openssl"), *words.split()]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=30)
    return folder

"""A certificate for a name, usually `localhost`, untrusted until a test trusts it."""

import subprocess
from pathlib import Path

import pytest


def certificate(where: Path, name: str = "localhost", *others: str) -> Path:
    """Return a file with a key and its certificate for names, made by openssl(1)."""
    key, made = where / "tls-key.pem", where / "tls-made.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt",
        "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1", "-subj",
        f"/CN={name}", "-addext", "subjectAltName=" + ",".join(f"DNS:{one}" for one in (name, *others)),
        "-keyout", str(key), "-out", str(made),
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("needs openssl to make a certificate")
    both = where / "tls.pem"
    both.write_bytes(key.read_bytes() + made.read_bytes())
    return both

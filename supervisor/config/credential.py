"""``[credential.NAME]``: secrets that the host adds to requests of children."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hostlib.keys import KeyFileError, NoCredentialsError, read_key
from hostlib.user_values import join_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from supervisor.network.section import CredentialSection


def check_credentials(
    section: Mapping[str, CredentialSection],
) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for each value that a credential cannot have."""
    if not section:
        return
    from supervisor.network.credential import faults  # noqa: PLC0415 - with one

    for name, credential in section.items():
        for key, reason in (*faults(credential), *_check_files(credential)):
            yield f"{join_key(name)}.{key}", reason


def _check_files(credential: CredentialSection) -> Iterator[tuple[str, str]]:
    from supervisor.network.credential_file import (  # noqa: PLC0415 - ssl
        CertificateError,
        open_tls,
    )

    try:
        read_key(credential.file)
    except NoCredentialsError:
        pass  # ``missing_credentials`` tells
    except KeyFileError as why:
        yield "file", str(why)
    if credential.ca_file is not None:
        try:
            open_tls(credential.ca_file)
        except CertificateError as why:
            yield "ca_file", str(why)

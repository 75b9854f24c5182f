#!/usr/bin/env bash
# download.sh URL FOLDER: WikiText's archive, unpacked, for the two prepare.sh that need it.
set -euo pipefail
url=$1 folder=$2

fail() {
    echo "$1" >&2
    exit 1
}

again="run this again, or give a folder with it, prepare.sh WIKITEXT_DIR."
curl -fsL --connect-timeout 20 --head "$url" >/dev/null ||
    fail "WikiText-103 cannot be downloaded from $url (no network?): $again"
mkdir -p "$folder"
echo "downloading $url ..."
curl -fL --retry 5 -C - -o "$folder/wikitext.zip" "$url" ||
    fail "The download from $url was broken off: $again"
python - "$folder" <<'PYTHON' || fail "$folder/wikitext.zip is damaged: remove it and run this again."
import pathlib, sys, zipfile
folder = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(folder / "wikitext.zip") as archive:
    for name in archive.namelist():
        if name.endswith((".tokens", ".raw")):
            (folder / pathlib.Path(name).name).write_bytes(archive.read(name))
PYTHON
rm "$folder/wikitext.zip"

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
python - "$folder" <<'PYTHON'
import pathlib, sys, zipfile, zlib
folder = pathlib.Path(sys.argv[1])
part = folder / "part"
try:
    with zipfile.ZipFile(folder / "wikitext.zip") as archive:
        for name in archive.namelist():
            if name.endswith((".tokens", ".raw")):
                part.write_bytes(archive.read(name))
                part.rename(folder / pathlib.Path(name).name)
except (zipfile.BadZipFile, zlib.error):
    sys.exit(f"{folder}/wikitext.zip is damaged: remove it and run this again.")
except OSError as error:
    part.unlink(missing_ok=True)
    sys.exit(f"{folder} cannot be written: {error.strerror}.")
PYTHON
rm "$folder/wikitext.zip"

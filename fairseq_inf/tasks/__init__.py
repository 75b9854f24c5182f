"""fairseq imports every file here.  An experiment has its task in a room of its own."""

from importlib import import_module
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
for path in sorted(PACKAGE.rglob("task.py")):
    import_module(".".join(["fairseq_inf", *path.relative_to(PACKAGE).with_suffix("").parts]))

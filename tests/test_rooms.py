"""Which room of the package may import which."""

import ast

import pytest
from conftest import ROOT

PACKAGE = ROOT / "fairseq_inf"
# beside the rooms; they import none of them, but that `from_pretrained` of __init__ opens the hub
FACE = {"__init__", "errors", "files"}
LOW = ["memory", "modules", "models"]
MIDDLE = {"data", "tasks", "criterions"}
ROOMS = {
    "errors": set(),
    "files": set(),
    "memory": {"memory"},
    "modules": {"memory", "modules"},
    "models": {*LOW},
    **{room: {*LOW, *MIDDLE} for room in sorted(MIDDLE)},
    "pretrained": {"memory", "modules", "models", "data", "pretrained"},
    "talk": {*LOW, *MIDDLE, "hub"},
    **dict.fromkeys(
        ("analysis", "commands", "hub"),
        {*LOW, *MIDDLE, "pretrained", "analysis", "commands", "hub", "talk"},
    ),
}
GUESTS = ["dialogue", "experiments"]  # import what they like, and are imported by none
FILES = sorted(PACKAGE.rglob("*.py"))


def room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_room(name):
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()


def imported(path):
    """The modules that a file imports, at its top or inside a function, by their whole names."""
    here = ("fairseq_inf", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            # a name may be a room or a module of one
            yield from [f"{module}.{name.name}" for name in node.names]


def registers_only(path):
    """Whether a file of tasks/ or models/ is there for what it imports alone."""
    body = ast.parse(path.read_text("utf-8")).body
    kinds = (ast.Import, ast.ImportFrom, ast.Expr, ast.Assign)
    return room(path) in {"tasks", "models"} and all(isinstance(x, kinds) for x in body)


@pytest.mark.parametrize("own", sorted([*ROOMS, *GUESTS]))
def test_a_room_imports_those_below_it_alone(own):
    for path in (path for path in FILES if room(path) == own):
        allowed = FACE | ROOMS.get(own, {*ROOMS, *GUESTS})
        if registers_only(path):
            allowed = allowed.union(GUESTS)
        for name in imported(path):
            parts = name.split(".")
            if parts[0] == "fairseq_inf" and len(parts) > 1:
                assert parts[1] in allowed or not is_room(parts[1]), (path, name)


def test_every_room_has_its_rule():
    assert {room(path) for path in FILES} <= {*ROOMS, *FACE, *GUESTS}


@pytest.mark.parametrize("own", ["memory", "modules"])
def test_the_mathematics_know_nothing_of_fairseq(own):
    for path in PACKAGE.glob(f"{own}/*.py"):
        for name in imported(path):
            assert name.split(".")[0] not in {"fairseq", "omegaconf", "hydra"}, path

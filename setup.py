import re
from pathlib import Path

from setuptools import find_packages, setup

PACKAGE = Path(__file__).parent / "fairseq_inf"
EXTRAS = {
    "dialogue": ["nltk", "rouge-score", "sacrebleu"],
    "figures": ["matplotlib"],
    # lm_eval alone would bring a huggingface_hub that transformers 4 cannot use
    "evaluation": ["lm_eval>=0.4.13", "transformers>=4.40,<5"],
    "tensorboard": ["tensorboardX"],
    # transformers 5 imports torchaudio, which fairseq-fixed brings, and which needs CUDA
    "pretrained": ["transformers>=4.40,<5", "gguf", "jinja2"],
}
HEAVY = ["evaluation"]  # 380 MB of other packages: its tests are skipped without them
TESTS = ["pytest", "pytest-xdist", "ruff", "mypy", "selenium"]

setup(
    name="fairseq_inf",
    version=re.search('__version__ = "(.+)"', (PACKAGE / "__init__.py").read_text("utf-8"))[1],
    description="The ∞-former, a transformer with an unbounded memory, as a fairseq plugin",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["fairseq_inf", "fairseq_inf.*"]),
    package_data={"fairseq_inf": ["py.typed", "analysis/page.html"]},
    install_requires=[
        "torch>=2.1",
        "numpy",
        "fairseq==0.12.2; python_version < '3.11'",
        "fairseq-fixed==0.12.3.1; python_version >= '3.11'",
        "safetensors",
        "sentencepiece",
        "tqdm",
    ],
    entry_points={
        "console_scripts": [
            "fairseq-inf-capacity = fairseq_inf.analysis.capacity:main",
            "fairseq-inf-chat = fairseq_inf.commands.chat:main",
            "fairseq-inf-compare = fairseq_inf.experiments.compare:main",
            "fairseq-inf-dialogue = fairseq_inf.dialogue.evaluate:main",
            "fairseq-inf-evaluate = fairseq_inf.experiments.evaluate:main",
            "fairseq-inf-inspect = fairseq_inf.commands.inspect_memory:main",
            "fairseq-inf-import = fairseq_inf.commands.import_model:main",
            "fairseq-inf-needles = fairseq_inf.experiments.needles:main",
            "fairseq-inf-prepare = fairseq_inf.commands.prepare:main",
            "fairseq-inf-prepare-dialogue = fairseq_inf.dialogue.prepare:main",
            "fairseq-inf-read = fairseq_inf.commands.read:main",
            "fairseq-inf-recall = fairseq_inf.experiments.recall.figure:main",
            "fairseq-inf-sorting = fairseq_inf.experiments.sorting.figures:main",
            "fairseq-inf-worth = fairseq_inf.experiments.worth:main",
        ]
    },
    extras_require={
        **EXTRAS,
        "test": [*TESTS, *sum((own for name, own in EXTRAS.items() if name not in HEAVY), [])],
    },
)

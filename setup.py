from setuptools import find_packages, setup

# 5 imports torchaudio, which fairseq-fixed brings, and which needs CUDA
TRANSFORMERS = "transformers>=4.40,<5"

setup(
    name="fairseq_inf",
    version="0.3.0",
    description="The ∞-former, a transformer with an unbounded memory, as a fairseq plugin",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["fairseq_inf", "fairseq_inf.*"]),
    install_requires=[
        "torch>=2.1",
        "numpy",
        "fairseq==0.12.2; python_version < '3.11'",
        "fairseq-fixed==0.12.3.1; python_version >= '3.11'",
        "safetensors",
        "sentencepiece",
        "sacrebleu",
        "tensorboardX",
        "tqdm",
        "matplotlib",
    ],
    entry_points={
        "console_scripts": [
            "fairseq-inf-capacity = fairseq_inf.analysis.capacity:main",
            "fairseq-inf-read = fairseq_inf.read:main",
        ]
    },
    extras_require={
        "gpt2": [TRANSFORMERS],
        "test": ["pytest", "pytest-xdist", "ruff", TRANSFORMERS],
    },
)

